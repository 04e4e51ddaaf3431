//! Seeded bugs: with the feature `mutations`, a test switches one on for its thread and shows that the crash
//! simulator finds it. Without the feature, [`active`] is the constant `false`.

/// A bug that can be switched on.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Mutation {
    /// A commit is acknowledged without a flush.
    AcknowledgeBeforeFlush,
    /// Recovery takes the whole chain of frames for true, whatever is on the blocks that it names.
    SkipTailVerification,
    /// Recovery accepts frames whose predecessor or epoch is another one.
    AcceptStaleFrame,
    /// Recovery does not verify the payload of frames.
    AcceptTornPayload,
    /// Replay leaves the first frame out.
    ReplayOneFrameLate,
    /// A checkpoint forgets that the log still holds pages that are not home.
    ForgetOwedPayload,
    /// Each phase of a checkpoint gives the log's space back, before any superblock says so.
    ReleaseLogEarly,
    /// A checkpoint hands freed blocks out before its superblock is durable.
    ReuseBeforeCheckpoint,
    /// The superblock is written without a flush of what it refers to.
    SuperblockBeforeFlush,
    /// A checkpoint overwrites the root that the durable superblock names.
    OverwriteDurableRoot,
    /// Unlinking the last name leaves no orphan item.
    ForgetOrphan,
    /// A cut leaves old bytes behind the new end of the file on the medium.
    SkipZeroTail,
    /// Pages overwrite their home although the log does not hold them.
    OverwriteUnlogged,
    /// A large fsync logs the size without waiting for the data.
    SizeBeforeData,
    /// Replay ignores deletions.
    IgnoreDeletes,
    /// A flush acknowledges every callback there is, also of operations that were not written before it.
    AcknowledgeOutOfOrder,
    /// A barrier does not see to the data before it.
    IgnoreBarrier,
    /// Who waits for the number of a barrier, which no operation has yet, is told when the operation before is durable.
    EarlyBarrier,
    /// A ranged sync logs the whole size of the file.
    SizeBeyondRange,
    /// Pages that could not be written count as written: the next sync finds nothing to do, and succeeds.
    SwallowWriteError,
    /// A batch goes into several frames that are not held together: replay takes those of them that it finds.
    CutBatch,
    /// Recovery keeps the frames of a chain that it finds, whether the chain is complete or not.
    ReplayPartOfChain,
    /// Recovery takes payload home as it reads it the second time, without another look at its checksum.
    TrustSecondRead,
    /// Opening does not notice that frames are missing that were durable before the checkpoint.
    ForgetDurableFrames,
    /// An operation that settles several runs looks each of them up as if the others were not in it.
    ForgetEarlierRuns,
    /// What a file's mapping gains or loses is not noted where it is kept in memory: the next change takes mapped blocks for a hole.
    ForgetMapped,
    /// When an older version of a page has got home, what the log has got of it meanwhile counts as home too.
    SettleNewer,
    /// A frame counts as written although the data that was written beside it is missing.
    CountWithoutData,
    /// A frame counts as written while data that began before it is still on its way.
    CountBegun,
    /// A full volume is overwritten page by page, so that a crash tears what was written as one.
    TearInPlace,
    /// A sync that asks whether everything is durable already takes what the log's open frame holds for durable.
    TakeLoggedForDurable,
    /// The log goes on owing what it has of a page of which a newer version was written beside a frame: replay brings the older one back.
    OweWhatIsBeside,
    /// A block that was an extent of its own is taken for one although others have joined it: to replace it forgets the others.
    KeepOwnExtent,
    /// A round of writeback is in the log before it is home: a sync of somebody else makes that durable, and not the data.
    SettleUnderway,
    /// The frame behind one that has to move stays where it is, and is written again behind that: replay may find both where they were.
    KeepFrameBehind,
    /// Who has written the frame behind one that has moved does not hear that it is void.
    ForgetWiped,
    /// An operation is applied to the running transaction a moment after the log has it: a checkpoint may come in between.
    ApplyOutsideGate,
    /// What a checkpoint could not write of bitmaps and root counts as written when it is tried again.
    SkipRefusedSpace,
    /// A frame whose data is missing counts before the open chain ends that what makes up for it lies in.
    CountBeforeChain,
    /// A rename puts a file in another one's place before its data.
    RenameBeforeData,
    /// A cut that goes on in another operation leaves no orphan item.
    ForgetCutMark,
    /// A file gets longer, or what lies behind its end is moved, before a cut of it has ended of which an operation failed.
    ForgetOwedCut,
    /// Recovery does not go on with a cut that a crash has interrupted.
    LeaveCut,
    /// The rest of the page that a cut ends in becomes zero before it is certain that the file is cut.
    ZeroBeforeCut,
    /// A batch cuts a file while the page that the cut ends in is overwritten where it lives.
    CutBesideHome,
    /// A range is inserted at the start of a file whose first page writeback has put into the inode meanwhile.
    LeavePageInline,
    /// An opening amid whose recovery another one began takes frames of any older epoch: one that was cut comes back in place of its successor.
    AnyReplayEpoch,
    /// An allocation leaves out the last block of its range.
    AllocateShort,
    /// What takes blocks away leaves those that were allocated and never written.
    KeepUnwritten,
    /// A write moves the modification time alone.
    ForgetChangeTime,
    /// A write through a handle that syncs returns without a sync.
    SkipWriteSync,
    /// An inode is purged with its last name, whoever has it open or holds it.
    ForgetUsers,
    /// An attribute that must not exist yet is replaced.
    CreateOver,
    /// What is left of a cut, and done later or after a crash, moves times.
    MoveTimesOfRest,
    /// A write ends early, though there is room for all of it.
    WriteShort,
    /// A sync whose ticket was dropped is not done.
    CancelDropped,
    /// A change of attributes answers those before it.
    AnswerBefore,
    /// A barrier answers the number of the operation before it.
    AnswerEarlier,
}

impl Mutation {
    /// All of them.
    pub const ALL: [Self; 58] = [
        Self::AcknowledgeBeforeFlush,
        Self::SkipTailVerification,
        Self::AcceptStaleFrame,
        Self::AcceptTornPayload,
        Self::ReplayOneFrameLate,
        Self::ForgetOwedPayload,
        Self::ReleaseLogEarly,
        Self::ReuseBeforeCheckpoint,
        Self::SuperblockBeforeFlush,
        Self::OverwriteDurableRoot,
        Self::ForgetOrphan,
        Self::SkipZeroTail,
        Self::OverwriteUnlogged,
        Self::SizeBeforeData,
        Self::IgnoreDeletes,
        Self::AcknowledgeOutOfOrder,
        Self::IgnoreBarrier,
        Self::EarlyBarrier,
        Self::SizeBeyondRange,
        Self::SwallowWriteError,
        Self::CutBatch,
        Self::ReplayPartOfChain,
        Self::TrustSecondRead,
        Self::ForgetDurableFrames,
        Self::ForgetEarlierRuns,
        Self::ForgetMapped,
        Self::SettleNewer,
        Self::CountWithoutData,
        Self::CountBegun,
        Self::TearInPlace,
        Self::TakeLoggedForDurable,
        Self::OweWhatIsBeside,
        Self::KeepOwnExtent,
        Self::SettleUnderway,
        Self::KeepFrameBehind,
        Self::ForgetWiped,
        Self::ApplyOutsideGate,
        Self::SkipRefusedSpace,
        Self::CountBeforeChain,
        Self::RenameBeforeData,
        Self::ForgetCutMark,
        Self::ForgetOwedCut,
        Self::LeaveCut,
        Self::ZeroBeforeCut,
        Self::CutBesideHome,
        Self::LeavePageInline,
        Self::AnyReplayEpoch,
        Self::AllocateShort,
        Self::KeepUnwritten,
        Self::ForgetChangeTime,
        Self::SkipWriteSync,
        Self::ForgetUsers,
        Self::CreateOver,
        Self::MoveTimesOfRest,
        Self::WriteShort,
        Self::CancelDropped,
        Self::AnswerBefore,
        Self::AnswerEarlier,
    ];

    /// The name on the simulator's command line.
    pub const fn name(self) -> &'static str {
        match self {
            Self::AcknowledgeBeforeFlush => "acknowledge-before-flush",
            Self::SkipTailVerification => "skip-tail-verification",
            Self::AcceptStaleFrame => "accept-stale-frame",
            Self::AcceptTornPayload => "accept-torn-payload",
            Self::ReplayOneFrameLate => "replay-one-frame-late",
            Self::ForgetOwedPayload => "forget-owed-payload",
            Self::ReleaseLogEarly => "release-log-early",
            Self::ReuseBeforeCheckpoint => "reuse-before-checkpoint",
            Self::SuperblockBeforeFlush => "superblock-before-flush",
            Self::OverwriteDurableRoot => "overwrite-durable-root",
            Self::ForgetOrphan => "forget-orphan",
            Self::SkipZeroTail => "skip-zero-tail",
            Self::OverwriteUnlogged => "overwrite-unlogged",
            Self::SizeBeforeData => "size-before-data",
            Self::IgnoreDeletes => "ignore-deletes",
            Self::AcknowledgeOutOfOrder => "acknowledge-out-of-order",
            Self::IgnoreBarrier => "ignore-barrier",
            Self::EarlyBarrier => "early-barrier",
            Self::SizeBeyondRange => "size-beyond-range",
            Self::SwallowWriteError => "swallow-write-error",
            Self::CutBatch => "cut-batch",
            Self::ReplayPartOfChain => "replay-part-of-chain",
            Self::TrustSecondRead => "trust-second-read",
            Self::ForgetDurableFrames => "forget-durable-frames",
            Self::ForgetEarlierRuns => "forget-earlier-runs",
            Self::ForgetMapped => "forget-mapped",
            Self::SettleNewer => "settle-newer",
            Self::CountWithoutData => "count-without-data",
            Self::CountBegun => "count-begun",
            Self::TearInPlace => "tear-in-place",
            Self::TakeLoggedForDurable => "take-logged-for-durable",
            Self::OweWhatIsBeside => "owe-what-is-beside",
            Self::KeepOwnExtent => "keep-own-extent",
            Self::SettleUnderway => "settle-underway",
            Self::KeepFrameBehind => "keep-frame-behind",
            Self::ForgetWiped => "forget-wiped",
            Self::ApplyOutsideGate => "apply-outside-gate",
            Self::SkipRefusedSpace => "skip-refused-space",
            Self::CountBeforeChain => "count-before-chain",
            Self::RenameBeforeData => "rename-before-data",
            Self::ForgetCutMark => "forget-cut-mark",
            Self::ForgetOwedCut => "forget-owed-cut",
            Self::LeaveCut => "leave-cut",
            Self::ZeroBeforeCut => "zero-before-cut",
            Self::CutBesideHome => "cut-beside-home",
            Self::LeavePageInline => "leave-page-inline",
            Self::AnyReplayEpoch => "any-replay-epoch",
            Self::AllocateShort => "allocate-short",
            Self::KeepUnwritten => "keep-unwritten",
            Self::ForgetChangeTime => "forget-change-time",
            Self::SkipWriteSync => "skip-write-sync",
            Self::ForgetUsers => "forget-users",
            Self::CreateOver => "create-over",
            Self::MoveTimesOfRest => "move-times-of-rest",
            Self::WriteShort => "write-short",
            Self::CancelDropped => "cancel-dropped",
            Self::AnswerBefore => "answer-before",
            Self::AnswerEarlier => "answer-earlier",
        }
    }

    /// The mutation with this name.
    pub fn from_name(name: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|mutation| mutation.name() == name)
    }
}

#[cfg(feature = "mutations")]
mod switch {
    use super::Mutation;
    use std::cell::Cell;

    thread_local! {
        static ACTIVE: Cell<Option<Mutation>> = const { Cell::new(None) };
    }

    /// Switches a bug on for the calling thread, or all off.
    pub fn set(mutation: Option<Mutation>) {
        ACTIVE.set(mutation);
    }

    /// What is on in the calling thread.
    pub fn get() -> Option<Mutation> {
        ACTIVE.get()
    }

    /// This bug is on.
    pub fn active(mutation: Mutation) -> bool {
        ACTIVE.get() == Some(mutation)
    }
}

#[cfg(feature = "mutations")]
pub use switch::{active, get, set};

/// No bug is ever on in a build without the feature `mutations`.
#[cfg(not(feature = "mutations"))]
#[inline]
pub const fn active(_mutation: Mutation) -> bool {
    false
}
