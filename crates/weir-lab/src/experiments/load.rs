//! Ways to put load on a target: threads that start together, open-loop schedules, fills.

use std::sync::{Barrier, Condvar, Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::{Duration, Instant};

use super::Env;
use crate::error::{LabError, LabResult};
use crate::measure::{Recorder, Rng};
use crate::run::Cancel;
use crate::target::{Fs, LabFile, OpenHow};

/// What threads that wait for their start are told.
#[derive(Clone, Copy, Default)]
enum Word {
    /// Not all are there.
    #[default]
    Wait,
    /// All began at this moment.
    Go(Instant),
    /// They will never be all.
    Never,
}

/// Where threads wait until all are there, or until it is known that they never will be.
#[derive(Default)]
struct Start {
    /// How many are there.
    state: Mutex<(u64, Word)>,
    arrived: Condvar,
    given: Condvar,
}

impl Start {
    fn lock(&self) -> MutexGuard<'_, (u64, Word)> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Waits for the word.
    fn wait(&self) -> LabResult<Instant> {
        let mut state = self.lock();
        state.0 += 1;
        self.arrived.notify_one();
        loop {
            match state.1 {
                Word::Go(at) => return Ok(at),
                Word::Never => return Err(LabError::Cancelled),
                Word::Wait => {}
            }
            state = self.given.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
    }

    fn never(&self) {
        self.lock().1 = Word::Never;
        self.given.notify_all();
    }

    /// Starts them once there are so many.
    fn when_ready(&self, threads: u64) -> Instant {
        let mut state = self.lock();
        while state.0 < threads {
            state = self.arrived.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
        let now = Instant::now();
        state.1 = Word::Go(now);
        self.given.notify_all();
        now
    }
}

/// Runs `work(thread, epoch)` on `threads` threads that start together; returns the results and
/// the time from the common start to the last end. The first error wins.
pub fn together<T: Send>(
    threads: u64,
    work: impl Fn(u64, Instant) -> LabResult<T> + Sync,
) -> LabResult<(Vec<T>, Duration)> {
    let start = Start::default();
    std::thread::scope(|scope| {
        let mut handles = Vec::new();
        for t in 0..threads {
            let (start, work) = (&start, &work);
            let job = move || work(t, start.wait()?);
            match std::thread::Builder::new().spawn_scoped(scope, job) {
                Ok(handle) => handles.push(handle),
                Err(e) => {
                    // Those that are there already must not wait for ever for the others.
                    start.never();
                    return Err(LabError::io(format!("starting {threads} threads"), e));
                }
            }
        }
        let begun = start.when_ready(threads);
        let mut results = Vec::new();
        for handle in handles {
            match handle.join() {
                Ok(result) => results.push(result),
                Err(panic) => std::panic::resume_unwind(panic),
            }
        }
        let took = begun.elapsed();
        Ok((results.into_iter().collect::<LabResult<Vec<T>>>()?, took))
    })
}

/// Merges the recorders of several threads.
pub fn merged(recorders: impl IntoIterator<Item = Recorder>, epoch: Instant) -> Recorder {
    let mut all = Recorder::new(epoch);
    for r in recorders {
        all.merge(&r);
    }
    all
}

/// The moment after which no more operations are due. Those due before it are still carried out
/// and recorded: dropping a backlog would hide exactly the stall that made it.
#[derive(Default)]
pub struct Stop(OnceLock<Instant>);

impl Stop {
    /// Nothing that is due after now will be started.
    pub fn now(&self) {
        self.0.get_or_init(Instant::now);
    }

    /// Nothing that is due from `end` on will be started.
    pub fn at(end: Instant) -> Self {
        Stop(OnceLock::from(end))
    }

    fn reached(&self, due: Instant) -> bool {
        self.0.get().is_some_and(|at| due >= *at)
    }
}

/// An open-loop schedule: operation `i` is due at a fixed time whatever became of those before,
/// so an operation that starts late is charged for its wait.
pub struct Schedule {
    begun: Instant,
    period: Duration,
    next: u32,
}

impl Schedule {
    /// `per_second` operations from `begun` on.
    pub fn new(begun: Instant, per_second: f64) -> Self {
        Schedule { begun, period: Duration::from_secs_f64(1.0 / per_second), next: 0 }
    }

    /// The time the next operation is due, after waiting for it; `None` once it is past `stop`.
    pub fn wait(&mut self, stop: &Stop) -> Option<Instant> {
        let due = self.begun + self.period * self.next;
        loop {
            if stop.reached(due) {
                return None;
            }
            let Some(left) = due.checked_duration_since(Instant::now()).filter(|d| !d.is_zero())
            else {
                self.next += 1;
                return Some(due);
            };
            std::thread::sleep(left.min(Duration::from_millis(50)));
        }
    }
}

/// How long open loops run before they are recorded: what threads and files cost at first touch is no answer to what was asked.
pub const WARM_UP: Duration = Duration::from_millis(300);

/// Where the threads of open loops wait until all are ready.
pub struct StartLine {
    ready: Barrier,
    epoch: OnceLock<Instant>,
}

impl StartLine {
    /// For so many threads.
    pub fn new(threads: usize) -> Self {
        StartLine { ready: Barrier::new(threads), epoch: OnceLock::new() }
    }

    /// Waits for the others, and answers when recording begins: [`WARM_UP`] from then. Every thread must come here, also one
    /// that could not make ready.
    pub fn ready(&self) -> Instant {
        self.ready.wait();
        *self.epoch.get_or_init(|| Instant::now() + WARM_UP)
    }
}

/// Carries out `op(i)` by a schedule from [`WARM_UP`] before `epoch` until `stop`. What is due from `epoch` on is recorded,
/// and charged from when it was due.
pub fn open_loop(
    epoch: Instant,
    per_second: f64,
    stop: &Stop,
    op: impl FnMut(u64) -> LabResult<()>,
) -> LabResult<Recorder> {
    open_loop_into(Recorder::new(epoch), (epoch, per_second), stop, op)
}

/// The same, with a recorder of the caller's.
pub fn open_loop_into(
    mut recorder: Recorder,
    (epoch, per_second): (Instant, f64),
    stop: &Stop,
    mut op: impl FnMut(u64) -> LabResult<()>,
) -> LabResult<Recorder> {
    let begun = epoch.checked_sub(WARM_UP).unwrap_or(epoch);
    let mut schedule = Schedule::new(begun, per_second);
    let mut i = 0;
    while let Some(due) = schedule.wait(stop) {
        op(i)?;
        if due >= epoch {
            recorder.since(due);
        }
        i += 1;
    }
    Ok(recorder)
}

/// Paces a writer at a constant rate: sleeps until `done` of `per_second` may have happened.
pub fn pace(begun: Instant, done: u64, per_second: f64) {
    let due = begun + Duration::from_secs_f64(done as f64 / per_second);
    if let Some(left) = due.checked_duration_since(Instant::now()) {
        // Below the timer's grain, catching up later is closer to the rate than sleeping.
        if left > Duration::from_millis(1) {
            std::thread::sleep(left);
        }
    }
}

/// Fills the buffer from `offset` on. Fewer bytes would be read faster, and are no figure.
pub fn read_whole(file: &dyn LabFile, buf: &mut [u8], offset: u64) -> LabResult<()> {
    whole(file.read_at(buf, offset)?, buf.len(), offset)
}

/// An error when a read ended early.
pub fn whole(got_bytes: usize, wanted_bytes: usize, offset: u64) -> LabResult<()> {
    if got_bytes == wanted_bytes {
        return Ok(());
    }
    let text = format!("a read of {wanted_bytes} bytes at {offset} ended after {got_bytes}");
    Err(LabError::io(text, std::io::ErrorKind::UnexpectedEof.into()))
}

/// Data that does not compress and differs from block to block.
pub fn random_bytes(len: usize, seed: u64) -> Vec<u8> {
    let mut rng = Rng::new(seed, 0xDA7A);
    let mut out = vec![0; len];
    for chunk in out.chunks_mut(8) {
        chunk.copy_from_slice(&rng.draw().to_le_bytes()[..chunk.len()]);
    }
    out
}

/// Creates a file of `len` bytes with random data and makes it durable.
pub fn fill_file(fs: &dyn Fs, path: &str, len: u64, seed: u64, cancel: &Cancel) -> LabResult<()> {
    let file = fs.open(path, OpenHow::Create)?;
    let data = random_bytes(1 << 20, seed);
    let mut at = 0;
    while at < len {
        cancel.check()?;
        let n = (len - at).min(data.len() as u64) as usize;
        file.write_at(&data[..n], at)?;
        at += n as u64;
    }
    file.fsync()?;
    Ok(())
}

/// Leaves nothing of one case to the next: everything durable, the device idle. Answers whether it came to be idle in the end.
pub fn settle(env: &Env<'_>) -> LabResult<bool> {
    env.fs.syncfs().or_else(|e| match LabError::from(e) {
        LabError::NotOffered(_) => Ok(()),
        other => Err(other),
    })?;
    let begun = Instant::now();
    let mut quiet_since = Instant::now();
    let mut last = env.fs.device();
    while last.is_some() && begun.elapsed() < Duration::from_secs(5) {
        std::thread::sleep(Duration::from_millis(10));
        env.cancel.check()?;
        let now = env.fs.device();
        if now != last {
            (last, quiet_since) = (now, Instant::now());
        }
        if quiet_since.elapsed() > Duration::from_millis(40) {
            return Ok(true);
        }
    }
    Ok(last.is_none())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::target::mounted::{Cold, MountedFs};

    #[test]
    fn a_schedule_is_due_by_the_clock_not_by_the_last_operation() {
        let begun = Instant::now();
        let mut s = Schedule::new(begun, 1000.0);
        let stop = Stop::default();
        let first = s.wait(&stop).expect("due");
        std::thread::sleep(Duration::from_millis(5));
        // Late, but still charged from when it was due.
        let second = s.wait(&stop).expect("due");
        assert_eq!(first, begun);
        assert_eq!(second, begun + Duration::from_millis(1));
        stop.now();
        // What was due before the stop is not dropped, what is due after it is not begun.
        let mut rest = 0;
        while s.wait(&stop).is_some() {
            rest += 1;
        }
        assert!(rest >= 3, "{rest} operations were overdue by 5 ms at 1 ms each");
    }

    #[test]
    fn a_schedule_with_an_end_has_all_that_is_due_before_it_however_late_it_is_asked() {
        let now = Instant::now();
        let ago = |ms| now.checked_sub(Duration::from_millis(ms)).expect("booted by then");
        let mut late = Schedule::new(ago(500), 1000.0);
        let stop = Stop::at(ago(400));
        let due: Vec<Instant> = std::iter::from_fn(|| late.wait(&stop)).collect();
        assert_eq!((due.len(), due.last()), (100, Some(&ago(401))));
    }

    #[test]
    fn an_open_loop_records_what_is_due_after_its_warm_up() {
        let (line, stop) = (StartLine::new(2), Stop::default());
        std::thread::scope(|scope| {
            scope.spawn(|| {
                let epoch = line.ready();
                std::thread::sleep(WARM_UP + Duration::from_millis(100));
                stop.now();
                assert!(Instant::now() >= epoch + Duration::from_millis(100));
            });
            let epoch = line.ready();
            let mut done = 0;
            let recorder = open_loop(epoch, 200.0, &stop, |i| {
                assert_eq!(i, done);
                done += 1;
                // A start that is slow is not held against those that come later.
                std::thread::sleep(Duration::from_millis(if i == 0 { 100 } else { 0 }));
                Ok(())
            })
            .expect("no error");
            assert!(recorder.count() >= 20, "{}", recorder.count());
            assert_eq!(done - recorder.count(), 60, "those of the warm-up");
            assert_eq!(recorder.series()[0].count, 20);
        });
    }

    #[test]
    fn the_first_error_of_threads_is_returned_and_all_are_joined() {
        let out = together(3, |t, _| if t == 1 { Err(LabError::Cancelled) } else { Ok(t) });
        assert!(matches!(out, Err(LabError::Cancelled)));
        let (all, _) = together(3, |t, _| Ok(t)).expect("no error");
        assert_eq!(all, [0, 1, 2]);
    }

    #[test]
    fn a_read_that_ends_early_is_an_error() {
        let dir = std::env::temp_dir().join(format!("weir-lab-short-{}", std::process::id()));
        std::fs::create_dir_all(&dir).expect("made");
        let fs = MountedFs::new(dir.clone(), None, Cold::Advise);
        fill_file(&fs, "f", 5000, 1, &Cancel::default()).expect("filled");
        let file = fs.open("f", OpenHow::Read).expect("there");
        let mut buf = [0; 4096];
        read_whole(&*file, &mut buf, 0).expect("whole");
        let error = read_whole(&*file, &mut buf, 4096).expect_err("904 bytes").to_string();
        assert!(error.contains("at 4096 ended after 904"), "{error}");
        std::fs::remove_dir_all(dir).expect("removed");
    }

    #[test]
    fn threads_that_wait_for_others_are_told_when_those_never_come() {
        let start = Start::default();
        std::thread::scope(|scope| {
            let waiting = [scope.spawn(|| start.wait()), scope.spawn(|| start.wait())];
            start.never();
            assert!(waiting.into_iter().all(|t| t.join().expect("ends").is_err()));
        });
        let (epochs, _) = together(3, |_, epoch| Ok(epoch)).expect("no error");
        assert!(epochs.windows(2).all(|pair| pair[0] == pair[1]), "one start for all");
    }

    #[test]
    fn random_data_is_reproducible_and_not_constant() {
        assert_eq!(random_bytes(100, 5), random_bytes(100, 5));
        assert_ne!(random_bytes(100, 5), random_bytes(100, 6));
    }
}
