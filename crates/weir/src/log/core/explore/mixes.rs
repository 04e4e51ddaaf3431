//! What is explored: which submitters, with how many drivers, in which circumstances; and that the explorer would notice.

use super::*;

const ALL_WANTS: [Want; 8] = [
    Want::Durable,
    Want::Beside,
    Want::Written,
    Want::Callback,
    Want::Patient,
    Want::Hurry,
    Want::WriteOut,
    Want::Flush,
];

/// All multisets of `count` wants (the submitters are symmetric).
fn mixes(count: usize) -> Vec<Vec<Want>> {
    let mut result = vec![(vec![], 0)];
    for _ in 0..count {
        let longer = |(wants, from): (Vec<Want>, usize)| {
            (from..ALL_WANTS.len()).map(move |index| {
                let mut wants = wants.clone();
                wants.push(ALL_WANTS[index]);
                (wants, index)
            })
        };
        result = result.into_iter().flat_map(longer).collect();
    }
    result.into_iter().map(|(wants, _)| wants).collect()
}

/// The mix, or, with a chain, one for each that can be the first, which has the chain.
fn with_first(wants: &[Want], chain: bool) -> Vec<Vec<Want>> {
    if !chain {
        return vec![wants.to_vec()];
    }
    let may_be_first = |&at: &usize| {
        !matches!(wants[at], Want::Flush | Want::Hurry) && !wants[..at].contains(&wants[at])
    };
    let rotated = |at: usize| {
        let mut wants = wants.to_vec();
        wants[..=at].rotate_right(1);
        wants
    };
    (0..wants.len()).filter(may_be_first).map(rotated).collect()
}

/// Explores all mixes of `count` that `chosen` takes, and says how much that was.
fn explore_mixes(
    count: usize,
    drivers: usize,
    variants: &[(bool, bool)],
    chosen: impl Fn(&[Want]) -> bool,
) {
    let (mut states, mut depth, mut explored) = (0, 0, 0);
    for wants in mixes(count).into_iter().filter(|wants| chosen(wants)) {
        for &(fua, chain) in variants {
            for wants in with_first(&wants, chain) {
                let scenario = Scenario { wants, drivers, fails: true, fua, chain };
                let text = format!("{:?} fua {fua} chain {chain}", scenario.wants);
                let explorer = Explorer::explore(scenario, None);
                println!("{text}: {} states, depth {}", explorer.seen.len(), explorer.depth);
                states += explorer.seen.len();
                depth = depth.max(explorer.depth);
                explored += 1;
            }
        }
    }
    println!(
        "{count} submitters, {drivers} drivers: {explored} scenarios, {states} states, depth {depth}"
    );
}

const PLAIN: [(bool, bool); 1] = [(false, false)];
const FORCED: [(bool, bool); 1] = [(true, false)];
const CHAINS: [(bool, bool); 2] = [(false, true), (true, true)];
const ALL_VARIANTS: [(bool, bool); 4] =
    [(false, false), (true, false), (false, true), (true, true)];

/// Whether nobody has data beside its frame: there is a test for those who do.
fn all(wants: &[Want]) -> bool {
    !beside(wants)
}

fn beside(wants: &[Want]) -> bool {
    wants.contains(&Want::Beside)
}

/// Whether somebody is patient: that is half of the work with four.
fn patient(wants: &[Want]) -> bool {
    wants.contains(&Want::Patient) && !beside(wants)
}

#[test]
fn every_interleaving_of_four_acknowledges_truly_and_strands_nobody() {
    explore_mixes(4, 1, &PLAIN, all);
}

#[test]
fn forced_writes_keep_the_rules_in_every_interleaving() {
    explore_mixes(3, 2, &FORCED, all);
}

#[test]
fn chains_keep_the_rules_in_every_interleaving() {
    explore_mixes(2, 2, &CHAINS, all);
    explore_mixes(3, 1, &CHAINS, all);
}

#[test]
fn several_drivers_share_the_work_and_strand_none() {
    explore_mixes(3, 2, &PLAIN, all);
    explore_mixes(2, 3, &PLAIN, all);
}

#[test]
fn data_beside_frames_keeps_the_rules_in_every_interleaving() {
    explore_mixes(3, 1, &ALL_VARIANTS, beside);
    explore_mixes(2, 2, &ALL_VARIANTS, beside);
}

/// About a minute in a release build: `cargo test --release -p weir --lib log::core::explore -- --nocapture`.
#[test]
#[cfg_attr(debug_assertions, ignore = "for release builds")]
fn every_interleaving_of_four_and_two_drivers_with_patient_ones() {
    explore_mixes(4, 2, &PLAIN, patient);
}

/// As above.
#[test]
#[cfg_attr(debug_assertions, ignore = "for release builds")]
fn every_interleaving_of_four_and_two_drivers_without_patient_ones() {
    explore_mixes(4, 2, &PLAIN, |wants| all(wants) && !patient(wants));
}

/// As above.
#[test]
#[cfg_attr(debug_assertions, ignore = "for release builds")]
fn every_interleaving_of_four_of_whom_one_has_data_beside() {
    explore_mixes(4, 1, &PLAIN, |wants| {
        wants.iter().filter(|&&want| want == Want::Beside).count() == 1
    });
}

/// Takes minutes: `cargo test --release -p weir --lib log::core::explore -- --nocapture --ignored`.
#[test]
#[ignore = "takes minutes"]
fn every_interleaving_of_three_with_chains_forced_writes_and_three_drivers() {
    explore_mixes(3, 3, &ALL_VARIANTS, all);
}

/// As above.
#[test]
#[ignore = "takes minutes"]
fn every_interleaving_of_four_with_chains_and_forced_writes() {
    explore_mixes(4, 1, &ALL_VARIANTS, all);
}

/// As above.
#[test]
#[ignore = "takes minutes"]
fn every_interleaving_of_five() {
    explore_mixes(5, 1, &PLAIN, all);
}

#[test]
fn every_planted_error_is_found() {
    use Planted::*;
    for planted in [
        FlushCoversLaterFrames,
        AcknowledgesAfterFailure,
        TakesFlushInFlight,
        CutsChain,
        ForcesTooMuch,
        SharesWriter,
        CountsOutOfTurn,
        ForgetsWhatIsOwed,
        CountsBeforeChain,
        CallsBackwards,
        CallsNobody,
        LooksForEver,
        FailsSilently,
        SetsNoAlarm,
        KeepsCallbacksAfterFailure,
    ] {
        let found = (1..=3).flat_map(mixes).find(|wants| {
            ALL_VARIANTS.iter().any(|&(fua, chain)| {
                with_first(wants, chain).into_iter().any(|wants| {
                    let scenario = Scenario { wants, drivers: 2, fails: true, fua, chain };
                    let explore = || Explorer::explore(scenario, Some(planted));
                    std::panic::catch_unwind(explore).is_err()
                })
            })
        });
        println!("{planted:?}: found by {found:?}");
        assert!(found.is_some(), "{planted:?} was not found");
    }
}

#[test]
fn no_state_is_taken_for_another() {
    let wants = vec![Want::Durable, Want::Patient, Want::Flush];
    let scenario = Scenario { wants, drivers: 2, fails: true, fua: false, chain: false };
    let explorer = Explorer::explore(scenario.clone(), None);
    let mut seen = HashSet::new();
    let mut todo = vec![World::new(&scenario)];
    while let Some(world) = todo.pop() {
        let mut successors = Vec::new();
        for number in 0..3 {
            explorer.steps(&world, Who::Submitter(number), &mut successors);
        }
        for number in 0..2 {
            explorer.steps(&world, Who::Driver(number), &mut successors);
        }
        for mut next in successors {
            next.simplify(&explorer.scenario);
            if seen.insert(next.clone()) {
                todo.push(next);
            }
        }
    }
    assert_eq!(seen.len(), explorer.seen.len());
}
