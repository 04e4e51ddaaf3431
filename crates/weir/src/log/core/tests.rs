use super::*;

fn write(core: &mut Core<u8, u8>, lsn: Lsn) -> Wake<u8> {
    let mut wake = Vec::new();
    core.frame_written(lsn, false, &mut wake);
    core.end_write();
    wake
}

fn flush_of(step: Step) -> Flush {
    let Step::Flush(flush) = step else { panic!("{step:?} is no flush") };
    flush
}

#[test]
fn a_caller_of_an_idle_log_writes_and_flushes_itself_and_calls_nobody() {
    let mut core = Core::<u8, u8>::new(5);
    core.driver_sleeps();
    assert_eq!(core.step(Goal::Durable(5)), Step::Done);
    assert_eq!(core.step(Goal::Durable(6)), Step::Write);
    assert_eq!(core.call(Beside::All), None);
    assert!(write(&mut core, 6).is_empty());
    let flush = flush_of(core.step(Goal::Durable(6)));
    assert_eq!(core.call(Beside::All), None);
    assert_eq!(core.end_flush(flush, &mut Vec::new()), 1);
    assert_eq!(core.step(Goal::Durable(6)), Step::Done);
    assert_eq!(core.call(Beside::All), None);
}

#[test]
fn frames_are_written_while_a_flush_is_in_flight_and_the_next_flush_covers_them() {
    let mut core = Core::<u8, u8>::new(0);
    assert_eq!(core.step(Goal::Durable(1)), Step::Write);
    let mut wake = write(&mut core, 1);
    let first = flush_of(core.step(Goal::Durable(1)));
    assert_eq!(core.step(Goal::Durable(2)), Step::Write);
    wake.extend(write(&mut core, 2));
    assert_eq!(core.step(Goal::Durable(2)), Step::Wait);
    core.park(Goal::Durable(2), 2);
    assert_eq!(core.step(Goal::Durable(3)), Step::Write);
    core.end_flush(first, &mut wake);
    assert_eq!((core.durable(), wake.len()), (1, 0));
    // The first leaves. The next flush waits for the frame that is being written.
    assert_eq!(core.call(Beside::Alarm), None);
    wake.extend(write(&mut core, 3));
    let second = flush_of(core.step(Goal::Durable(3)));
    assert_eq!(core.end_flush(second, &mut wake), 2);
    assert_eq!((core.durable(), wake), (3, vec![2]));
}

#[test]
fn who_leaves_calls_a_sleeper_for_the_frame_that_was_written_ahead() {
    let mut core = Core::<u8, u8>::new(0);
    core.driver_sleeps();
    assert_eq!(core.step(Goal::Durable(1)), Step::Write);
    let mut wake = write(&mut core, 1);
    let first = flush_of(core.step(Goal::Durable(1)));
    assert_eq!(core.step(Goal::Durable(2)), Step::Write);
    wake.extend(write(&mut core, 2));
    assert_eq!(core.step(Goal::Durable(2)), Step::Wait);
    core.park(Goal::Durable(2), 2);
    core.end_flush(first, &mut wake);
    assert_eq!(core.step(Goal::Durable(1)), Step::Done);
    assert_eq!((core.call(Beside::Alarm), core.call(Beside::Alarm)), (Some(Call::Caller(2)), None));
    let second = flush_of(core.look(Goal::Durable(2)));
    core.end_flush(second, &mut wake);
    assert_eq!((core.durable(), wake.len()), (2, 0));
}

#[test]
fn a_newcomer_may_be_faster_than_who_was_called() {
    let mut core = Core::<u8, u8>::new(0);
    assert_eq!(core.step(Goal::Durable(1)), Step::Write);
    assert_eq!(core.step(Goal::Durable(2)), Step::Wait);
    core.park(Goal::Durable(2), 2);
    let mut wake = write(&mut core, 1);
    let flush = flush_of(core.step(Goal::Durable(1)));
    assert_eq!(core.call(Beside::Alarm), Some(Call::Caller(2)));
    assert_eq!(core.step(Goal::Durable(3)), Step::Write);
    assert_eq!(core.look(Goal::Durable(2)), Step::Wait);
    core.park(Goal::Durable(2), 2);
    wake.extend(write(&mut core, 3));
    assert_eq!(core.end_flush(flush, &mut wake), 1);
    let flush = flush_of(core.step(Goal::Durable(3)));
    assert_eq!(core.end_flush(flush, &mut wake), 2);
    assert_eq!((core.durable(), wake), (3, vec![2]));
}

#[test]
fn drivers_are_called_for_callbacks_one_for_each_role() {
    let mut core = Core::<u8, u8>::new(0);
    for _ in 0..3 {
        core.driver_sleeps();
    }
    core.arrive_callback(1, 1, false);
    assert_eq!((core.call(Beside::All), core.call(Beside::All)), (Some(Call::Driver), None));
    core.driver_looks();
    assert_eq!(core.driver_step(), Step::Write);
    write(&mut core, 1);
    let flush = flush_of(core.driver_step());
    core.arrive_callback(2, 2, false);
    assert_eq!((core.call(Beside::All), core.call(Beside::All)), (Some(Call::Driver), None));
    core.driver_looks();
    assert_eq!(core.driver_step(), Step::Write);
    write(&mut core, 2);
    assert_eq!(core.driver_step(), Step::Wait);
    core.driver_sleeps();
    core.end_flush(flush, &mut Vec::new());
    // Goes on flushing: another one is to call back.
    let flush = flush_of(core.driver_step());
    assert_eq!((core.call(Beside::All), core.call(Beside::All)), (Some(Call::Driver), None));
    assert_eq!(core.take_acks(9), [(1, true)]);
    core.finish_acks();
    core.end_flush(flush, &mut Vec::new());
    assert_eq!(core.take_acks(9), [(2, true)]);
}

/// The driver that is called writes and flushes what there is.
fn drive(core: &mut Core<u8, u8>, lsn: Lsn) {
    assert_eq!(core.call(Beside::All), Some(Call::Driver));
    core.driver_looks();
    assert_eq!(core.driver_step(), Step::Write);
    write(core, lsn);
    let flush = flush_of(core.driver_step());
    core.end_flush(flush, &mut Vec::new());
    core.take_acks(99);
    core.finish_acks();
    assert_eq!((core.durable(), core.driver_step()), (lsn, Step::Wait));
}

#[test]
fn patient_callbacks_of_an_idle_log_are_gathered_only_after_many_came_at_once() {
    let mut core = Core::<u8, u8>::new(0);
    core.driver_sleeps();
    core.arrive_callback(1, 1, true);
    assert_eq!(core.call(Beside::All), Some(Call::Driver));
    core.driver_looks();
    assert_eq!(core.driver_step(), Step::Write);
    core.arrive_callback(2, 2, true);
    assert_eq!(core.gathering.enough(), 2);
    write(&mut core, 2);
    let flush = flush_of(core.driver_step());
    core.arrive_callback(3, 3, true);
    assert!(!core.wants_write() && !core.wants_flush());
    core.arrive_callback(4, 4, true);
    assert!(core.wants_write());
    core.end_flush(flush, &mut Vec::new());
    assert_eq!((core.gathering.enough(), core.durable()), (4, 2));
}

#[test]
fn what_is_gathered_goes_out_when_somebody_waits_and_half_of_it_the_next_time() {
    let mut core = Core::<u8, u8>::new(0);
    core.gathering.expect(128);
    for lsn in 1..=10 {
        core.arrive_callback(lsn, 0, true);
    }
    core.driver_sleeps();
    assert!(core.call(Beside::All).is_none(), "the alarm is set");
    core.hurry();
    core.alarm_off();
    drive(&mut core, 10);
    assert_eq!(core.gathering.enough(), 5);
    for lsn in 11..=15 {
        assert!(!core.wants_write());
        core.arrive_callback(lsn, 0, true);
    }
    assert!(core.wants_write());
}

#[test]
fn the_alarm_sends_out_what_was_gathered_and_lowers_what_is_expected() {
    let mut core = Core::<u8, u8>::new(0);
    core.gathering.expect(128);
    core.arrive_callback(1, 1, true);
    assert!(core.driver_sleeps() && !core.driver_sleeps());
    core.alarm_rings();
    assert_eq!((core.gathering.enough(), core.driver_step()), (1, Step::Write));
}

#[test]
fn a_group_for_somebody_else_takes_what_was_gathered_along() {
    let mut core = Core::<u8, u8>::new(0);
    core.gathering.expect(128);
    core.arrive_callback(1, 1, true);
    assert_eq!(core.step(Goal::Durable(2)), Step::Write);
    let mut wake = write(&mut core, 2);
    let flush = flush_of(core.step(Goal::Durable(2)));
    core.end_flush(flush, &mut wake);
    assert_eq!((core.take_acks(9), core.gathering.count()), (vec![(1, true)], 0));
    core.finish_acks();
    assert!(!core.driver_sleeps());
}

#[test]
fn a_flush_that_was_asked_for_starts_after_it_was_asked_for() {
    let mut core = Core::<u8, u8>::new(0);
    assert_eq!(core.step(Goal::Durable(1)), Step::Write);
    let mut wake = write(&mut core, 1);
    let first = flush_of(core.step(Goal::Durable(1)));
    let asked = core.next_flush();
    assert_eq!(core.step(asked), Step::Wait);
    core.park(asked, 9);
    core.end_flush(first, &mut wake);
    assert!(wake.is_empty() && !core.reached(asked));
    assert_eq!(core.call(Beside::Alarm), Some(Call::Caller(9)));
    let second = flush_of(core.look(asked));
    core.end_flush(second, &mut wake);
    assert_eq!(core.step(asked), Step::Done);
}

#[test]
fn a_batch_is_durable_as_a_whole_or_not_at_all() {
    let mut core = Core::<u8, u8>::new(0);
    let mut wake = Vec::new();
    assert_eq!(core.step(Goal::Durable(3)), Step::Write);
    core.frame_written(1, false, &mut wake);
    core.frame_written(2, true, &mut wake);
    core.end_write();
    let flush = flush_of(core.step(core.next_flush()));
    core.end_flush(flush, &mut wake);
    assert_eq!(core.durable(), 1);
    // Its frame is written, but not the end of the batch.
    assert_eq!(core.step(Goal::Durable(2)), Step::Write);
    wake.extend(write(&mut core, 3));
    let flush = flush_of(core.step(Goal::Durable(3)));
    core.end_flush(flush, &mut wake);
    assert_eq!(core.durable(), 3);
}

#[test]
fn nothing_becomes_durable_after_a_failure() {
    let mut core = Core::<u8, u8>::new(0);
    assert_eq!(core.step(Goal::Durable(1)), Step::Write);
    let mut wake = write(&mut core, 1);
    let flush = flush_of(core.step(Goal::Durable(1)));
    core.arrive_callback(3, 3, false);
    assert_eq!(core.step(Goal::Durable(2)), Step::Write);
    core.park(Goal::Flushed(2), 2);
    // The frame could not be written anywhere, while the flush was in flight.
    core.fail(&mut wake);
    core.end_write();
    assert_eq!(core.end_flush(flush, &mut wake), 0);
    assert_eq!((core.durable(), wake), (0, vec![2]));
    assert_eq!(core.step(Goal::Durable(1)), Step::Failed);
    assert_eq!(core.driver_step(), Step::Wait);
    assert_eq!(core.take_acks(9), [(3, false)]);
}
