//! fastread: do not queue what is in the cache.
//!
//! A server thread receives 16 KiB read requests: 73 % for f1 (zipf over a mostly cached file),
//! 18 % for f2 (uniform over a large uncached file), 9 % for f3 (sequential). Modes: *pool* (every
//! request goes to a thread pool), *nowait* (a cache-only read first, the pool on a miss),
//! *dontcache* (as nowait, but misses of f2 are read without leaving them in the cache),
//! *adaptive* (as nowait, but not where tries have not paid lately), *async* (native asynchronous
//! reads), *raw* (what a cached read costs with and without the flag, and what a refused one).
//!
//! Closed loop: at most `queue` requests are outstanding; a request's time runs from the moment the
//! server takes it. Open loop: from when it was due.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, mpsc};
use std::time::{Duration, Instant};

use super::load::{Schedule, Stop, WARM_UP, fill_file, read_whole, whole};
use super::{Better, Case, CaseResult, Env, Experiment, Size};
use crate::error::{LabError, LabResult};
use crate::measure::{Recorder, Rng, Zipf};
use crate::target::{FileRef, FsError, FsResult, OpenHow};

/// Options.
#[derive(Clone, Debug, Default, clap::Args)]
pub struct FastreadOptions {
    /// Requests outstanding in the closed loop
    #[arg(long, value_parser = clap::value_parser!(u64).range(1..=1 << 20), value_delimiter = ',')]
    pub queue: Vec<u64>,
    /// Requests per second in the open loop [default: 3000]
    #[arg(long, value_parser = clap::value_parser!(u64).range(1..=1_000_000))]
    pub rate: Option<u64>,
    /// Seconds per case [default: 8, medium: 1, quick: 0.8]
    #[arg(long, value_parser = super::seconds)]
    pub seconds: Option<f64>,
}

const REQUEST_BYTES: u64 = 16 << 10;
const POOL_THREADS: usize = 8;
const MIB: u64 = 1 << 20;
/// Part of f1 that is read into the cache beforehand.
const WARM_PERCENT: u64 = 90;

/// The experiment.
pub struct Fastread {
    queues: Vec<u64>,
    rate: u64,
    time: Duration,
    file_bytes: [u64; 3],
    size: Size,
}

impl Fastread {
    /// With options.
    pub fn new(o: &FastreadOptions, size: Size) -> Self {
        let queues: &[u64] = size.pick(&[64], &[16, 64], &[16, 64]);
        let seconds = o.seconds.unwrap_or(size.pick(0.8, 1.0, 8.0));
        Fastread {
            queues: if o.queue.is_empty() { queues.to_vec() } else { o.queue.clone() },
            rate: o.rate.unwrap_or(3000).max(1),
            time: Duration::from_secs_f64(seconds.clamp(0.05, 3600.0)),
            file_bytes: size.pick(
                [64 * MIB, 384 * MIB, 128 * MIB],
                [256 * MIB, 1024 * MIB, 256 * MIB],
                [256 * MIB, 2048 * MIB, 512 * MIB],
            ),
            size,
        }
    }
}

#[derive(Clone, Copy)]
struct Read {
    class: usize,
    offset: u64,
    from: Instant,
}

/// Draws requests.
struct Source {
    rng: Rng,
    zipf: Zipf,
    blocks: [u64; 3],
    sequential: u64,
}

impl Source {
    fn new(seed: u64, file_bytes: [u64; 3]) -> Self {
        let blocks = file_bytes.map(|b| b / REQUEST_BYTES);
        Source {
            rng: Rng::new(seed, 0xFA57),
            zipf: Zipf::new(blocks[0], 0.9),
            blocks,
            sequential: 0,
        }
    }

    fn next(&mut self) -> (usize, u64) {
        let (class, block) = match self.rng.below(100) {
            0..73 => (0, self.zipf.sample(&mut self.rng)),
            73..91 => (1, self.rng.below(self.blocks[1])),
            _ => {
                self.sequential += 1;
                (2, self.sequential % self.blocks[2])
            }
        };
        (class, block * REQUEST_BYTES)
    }
}

/// Keeps f2 uncached and f3 behind the reader uncached; targets that cannot are smaller than their
/// files by their own cap.
fn forget(file: &FileRef, read: Read) -> FsResult<()> {
    let dropped = match read.class {
        1 => file.drop_from_cache(read.offset, REQUEST_BYTES),
        2 if read.offset.is_multiple_of(MIB) && read.offset >= 2 * MIB => {
            file.drop_from_cache(read.offset - 2 * MIB, MIB)
        }
        _ => Ok(()),
    };
    match dropped {
        Err(FsError::NotOffered(_)) => Ok(()),
        other => other,
    }
}

/// A file, what to read from it, and whether to leave it in the cache.
type Job = (FileRef, Read, bool);

struct Pool {
    jobs: mpsc::Sender<Job>,
    /// Reads with the time they were done: the server may be waiting for its schedule then.
    done: mpsc::Receiver<LabResult<(Read, Instant)>>,
}

fn pool_worker(take: &Mutex<mpsc::Receiver<Job>>, put: &mpsc::Sender<LabResult<(Read, Instant)>>) {
    let mut buf = vec![0; REQUEST_BYTES as usize];
    loop {
        let job = match take.lock() {
            Ok(queue) => queue.recv(),
            Err(_) => return,
        };
        let Ok((file, read, keep)) = job else { return };
        let got = if keep {
            file.read_at(&mut buf, read.offset)
        } else {
            file.read_dontcache_at(&mut buf, read.offset)
        };
        let result = got.map_err(LabError::from).and_then(|bytes| {
            let done = Instant::now();
            whole(bytes, buf.len(), read.offset)?;
            forget(&file, read)?;
            Ok((read, done))
        });
        drop(file);
        if put.send(result).is_err() {
            return;
        }
    }
}

/// How often tries have paid lately, per file.
#[derive(Clone, Copy)]
pub struct TryPolicy {
    /// Moving average of hits, 0 to 1.
    hit_ratio: f64,
    skipped: u32,
}

impl Default for TryPolicy {
    fn default() -> Self {
        TryPolicy { hit_ratio: 1.0, skipped: 0 }
    }
}

impl TryPolicy {
    const WORTH: f64 = 0.1;
    const PROBE_EVERY: u32 = 32;

    /// Whether to try; a file that never hits is still probed now and then.
    pub fn should_try(&mut self) -> bool {
        if self.hit_ratio >= Self::WORTH {
            return true;
        }
        self.skipped += 1;
        if self.skipped >= Self::PROBE_EVERY {
            self.skipped = 0;
            return true;
        }
        false
    }

    /// Takes the outcome of a try into account.
    pub fn learn(&mut self, hit: bool) {
        self.hit_ratio += (f64::from(u8::from(hit)) - self.hit_ratio) / 16.0;
    }
}

#[derive(Default, Clone, Copy)]
struct Tries {
    tried: u64,
    hit: u64,
}

/// The server thread's state.
struct Server<'a> {
    env: &'a Env<'a>,
    files: [FileRef; 3],
    source: Source,
    recorders: [Recorder; 3],
    tries: [Tries; 3],
    policies: [TryPolicy; 3],
    mode: &'a str,
    buf: Vec<u8>,
    outstanding: u64,
    span: Span,
}

/// The time of a case.
#[derive(Clone, Copy)]
struct Span {
    begun: Instant,
    /// What is due before this is the warm-up of an open loop, and not recorded.
    record_from: Instant,
    /// What is due from here on is not begun.
    end: Instant,
}

impl Server<'_> {
    /// Tries the cache if the mode says so; true when that answered the request.
    fn answered_at_once(&mut self, read: Read) -> LabResult<bool> {
        let class = read.class;
        let wanted = match self.mode {
            "nowait" | "dontcache" => true,
            "adaptive" => self.policies[class].should_try(),
            _ => false,
        };
        if !wanted {
            return Ok(false);
        }
        let hit = self.files[class].read_cached_at(&mut self.buf, read.offset)?.is_some();
        self.policies[class].learn(hit);
        let recorded = self.record(read, Instant::now(), hit);
        self.tries[class].tried += u64::from(recorded);
        self.tries[class].hit += u64::from(recorded && hit);
        if hit {
            forget(&self.files[class], read)?;
        }
        Ok(hit)
    }

    /// Records a read that is done, unless it belongs to the warm-up; answers whether it does not.
    fn record(&mut self, read: Read, now: Instant, is_done: bool) -> bool {
        let counts = read.from >= self.span.record_from;
        if counts && is_done {
            let took = now.saturating_duration_since(read.from);
            self.recorders[read.class].record_at(read.from, took);
        }
        counts
    }

    fn next_read(&mut self, from: Instant) -> Read {
        let (class, offset) = self.source.next();
        Read { class, offset, from }
    }

    fn pooled(&mut self, pool: &Pool, loop_kind: Loop) -> LabResult<()> {
        let Span { begun, end, .. } = self.span;
        let stop = Stop::at(end);
        let mut schedule = loop_kind.schedule(begun);
        let mut count = 0_u64;
        loop {
            count += 1;
            if count.is_multiple_of(256) {
                self.env.cancel.check()?;
            }
            // An open loop ends by what is due, and not by the clock: what a stall has put off is still to be carried out.
            let due = match &mut schedule {
                Some(schedule) => schedule.wait(&stop),
                None => Some(Instant::now()).filter(|now| *now < end),
            };
            let Some(due) = due else { break };
            let read = self.next_read(due);
            if !self.answered_at_once(read)? {
                let keep = self.mode != "dontcache" || read.class != 1;
                let job = (Arc::clone(&self.files[read.class]), read, keep);
                pool.jobs.send(job).map_err(|_| LabError::BadOption("pool ended".into()))?;
                self.outstanding += 1;
            }
            while let Ok(done) = pool.done.try_recv() {
                self.finish_one(done?);
            }
            while self.outstanding >= loop_kind.limit() {
                self.receive(pool)?;
            }
        }
        while self.outstanding > 0 {
            self.receive(pool)?;
        }
        Ok(())
    }

    fn receive(&mut self, pool: &Pool) -> LabResult<()> {
        let done = pool.done.recv().map_err(|_| LabError::BadOption("pool ended".into()))?;
        self.finish_one(done?);
        Ok(())
    }

    fn finish_one(&mut self, (read, done): (Read, Instant)) {
        self.outstanding -= 1;
        self.record(read, done, true);
    }

    fn asynchronous(&mut self, loop_kind: Loop) -> LabResult<()> {
        let depth = loop_kind.limit().min(1024) as usize;
        let mut queue = self.env.fs.read_queue(depth)?;
        let Span { begun, end, .. } = self.span;
        let mut in_flight: HashMap<u64, Read> = HashMap::new();
        let mut tag = 0_u64;
        loop {
            let now = Instant::now();
            let due = loop_kind.due(begun, tag).unwrap_or(now);
            let running = due < end;
            if !running && in_flight.is_empty() {
                break;
            }
            let ready = running && in_flight.len() < depth && now >= due;
            if ready {
                let read = self.next_read(due);
                let file = &self.files[read.class];
                queue.submit(file, read.offset, REQUEST_BYTES as usize, tag)?;
                in_flight.insert(tag, read);
                tag += 1;
                if tag.is_multiple_of(256) {
                    self.env.cancel.check()?;
                }
            }
            // While the schedule has something to come, completions are polled for: sleeping in
            // either wait would charge one for the other.
            let wait = !in_flight.is_empty() && (!running || in_flight.len() >= depth);
            match queue.complete(wait)? {
                Some(done) => {
                    let got = done.result.map_err(|e| LabError::io("asynchronous read", e))?;
                    let Some(read) = in_flight.remove(&done.tag) else { continue };
                    whole(got, REQUEST_BYTES as usize, read.offset)?;
                    self.record(read, Instant::now(), true);
                    forget(&self.files[read.class], read)?;
                }
                None if !ready => std::thread::yield_now(),
                None => {}
            }
        }
        Ok(())
    }
}

/// Closed or open loop.
#[derive(Clone, Copy)]
enum Loop {
    Closed(u64),
    Open(u64),
}

impl Loop {
    fn schedule(self, begun: Instant) -> Option<Schedule> {
        match self {
            Loop::Closed(_) => None,
            Loop::Open(rate) => Some(Schedule::new(begun, rate as f64)),
        }
    }

    /// When request `i` is due; whenever there is room in the closed loop.
    fn due(self, begun: Instant, i: u64) -> Option<Instant> {
        match self {
            Loop::Closed(_) => None,
            Loop::Open(rate) => {
                Some(begun + Duration::from_secs_f64(i as f64 / rate.max(1) as f64))
            }
        }
    }

    /// A case that begins now.
    fn span(self, time: Duration) -> Span {
        let begun = Instant::now();
        let record_from = match self {
            Loop::Closed(_) => begun,
            Loop::Open(_) => begun + WARM_UP,
        };
        Span { begun, record_from, end: record_from + time }
    }

    /// Requests that may be outstanding; in the open loop as many as there are.
    fn limit(self) -> u64 {
        match self {
            Loop::Closed(queue) => queue.max(1),
            Loop::Open(_) => 1 << 20,
        }
    }
}

fn path(class: usize) -> &'static str {
    ["fastread/f1", "fastread/f2", "fastread/f3"][class]
}

impl Fastread {
    fn serve(&self, env: &Env<'_>, case: &Case) -> LabResult<CaseResult> {
        let open = |class| env.fs.open(path(class), OpenHow::Read);
        let loop_kind = match case.number("queue") {
            0 => Loop::Open(case.number("rate")),
            queue => Loop::Closed(queue),
        };
        let files = [open(0)?, open(1)?, open(2)?];
        let span = loop_kind.span(self.time);
        let mut server = Server {
            env,
            files,
            source: Source::new(env.seed, self.file_bytes),
            recorders: std::array::from_fn(|_| Recorder::new(span.record_from)),
            tries: [Tries::default(); 3],
            policies: [TryPolicy::default(); 3],
            mode: &case.mode,
            buf: vec![0; REQUEST_BYTES as usize],
            outstanding: 0,
            span,
        };
        if case.mode == "async" {
            server.asynchronous(loop_kind)?;
        } else {
            std::thread::scope(|scope| {
                let (jobs, take) = mpsc::channel();
                let (put, done) = mpsc::channel();
                let take = Arc::new(Mutex::new(take));
                for _ in 0..POOL_THREADS {
                    let (take, put) = (Arc::clone(&take), put.clone());
                    scope.spawn(move || pool_worker(&take, &put));
                }
                // Leaving drops the sender, which ends the workers, also after an error.
                let pool = Pool { jobs, done };
                server.pooled(&pool, loop_kind)
            })?;
        }
        Ok(report(&server, span.record_from.elapsed()))
    }

    fn raw(&self, env: &Env<'_>) -> LabResult<CaseResult> {
        let mut result = CaseResult::default();
        let hot = env.fs.open(path(0), OpenHow::Read)?;
        let mut rng = Rng::new(env.seed, 0x4A3);
        let span = self.file_bytes[0] / 100 * WARM_PERCENT / 2;
        let loops = self.size.pick(4000, 20_000, 40_000);
        for (bytes, name) in [(4_u64 << 10, "4k"), (16 << 10, "16k"), (64 << 10, "64k")] {
            let mut buf = vec![0; bytes as usize];
            let offsets: Vec<u64> = (0..loops).map(|_| rng.below(span / bytes) * bytes).collect();
            let begun = Instant::now();
            for at in &offsets {
                read_whole(&*hot, &mut buf, *at)?;
            }
            let plain = begun.elapsed().as_nanos() as f64 / loops as f64;
            result.metric(&format!("cached_{name}_ns"), "ns", plain, Better::Lower);
            let begun = Instant::now();
            let mut hits = 0_u64;
            for at in &offsets {
                hits += u64::from(hot.read_cached_at(&mut buf, *at)?.is_some());
            }
            let flagged = begun.elapsed().as_nanos() as f64 / loops as f64;
            result.metric(&format!("cached_nowait_{name}_ns"), "ns", flagged, Better::Lower);
            if hits < loops * 9 / 10 {
                result.notes.push(format!("only {hits} of {loops} {name} reads were cached"));
            }
        }
        let cold = env.fs.open(path(1), OpenHow::Read)?;
        let mut buf = vec![0; 4096];
        let (mut refused, mut spent) = (0_u64, Duration::ZERO);
        for _ in 0..400 {
            let at = rng.below(self.file_bytes[1] / MIB) * MIB;
            let begun = Instant::now();
            if cold.read_cached_at(&mut buf, at)?.is_none() {
                spent += begun.elapsed();
                refused += 1;
            }
        }
        if refused > 0 {
            let each = spent.as_nanos() as f64 / refused as f64;
            result.metric("refused_4k_ns", "ns", each, Better::Lower);
        }
        Ok(result)
    }
}

fn report(server: &Server<'_>, took: Duration) -> CaseResult {
    let mut result = CaseResult::default();
    let total: u64 = server.recorders.iter().map(Recorder::count).sum();
    let seconds = took.as_secs_f64();
    result.metric("requests_per_s", "1/s", total as f64 / seconds, Better::Higher);
    for (i, recorder) in server.recorders.iter().enumerate() {
        let class = ["f1", "f2", "f3"][i];
        let rate = recorder.count() as f64 / seconds;
        result.metric(&format!("{class}_requests_per_s"), "1/s", rate, Better::Higher);
        let fast = recorder.share_within_ns(2000) * 100.0;
        result.metric(&format!("{class}_within_2us_percent"), "%", fast, Better::Higher);
        let Tries { tried, hit } = server.tries[i];
        if tried > 0 {
            let ratio = hit as f64 * 100.0 / tried as f64;
            result.metric(&format!("{class}_try_hits_percent"), "%", ratio, Better::Neither);
            let share = tried as f64 * 100.0 / recorder.count().max(1) as f64;
            result.metric(&format!("{class}_tried_percent"), "%", share, Better::Neither);
        }
        result.latency(class, recorder.clone());
    }
    result
}

impl Experiment for Fastread {
    fn name(&self) -> &'static str {
        "fastread"
    }

    fn question(&self) -> &'static str {
        "What does a server gain that answers from the cache at once and queues only what is not?"
    }

    fn base_mode(&self) -> &'static str {
        "pool"
    }

    fn cases(&self) -> Vec<Case> {
        let all = ["pool", "nowait", "adaptive", "async", "dontcache"];
        let modes = if self.size.is_quick() { &all[..4] } else { &all[..] };
        let mut cases: Vec<Case> = self
            .queues
            .iter()
            .flat_map(|q| modes.iter().map(|m| Case::new(m).with("queue", *q)))
            .collect();
        cases.extend(modes.iter().map(|m| Case::new(m).with("rate", self.rate)));
        cases.push(Case::new("raw"));
        cases
    }

    fn prepare(&self, env: &Env<'_>) -> LabResult<()> {
        // A target that cannot drop ranges from its own cache gets one that f1 fits into and f2
        // does not.
        match env.fs.set_memory_cap(2 * self.file_bytes[0] + 64 * MIB) {
            Ok(()) | Err(FsError::NotOffered(_)) => {}
            Err(e) => return Err(e.into()),
        }
        env.fs.mkdir_all("fastread")?;
        for (class, bytes) in self.file_bytes.iter().enumerate() {
            fill_file(&*env.fs, path(class), *bytes, env.seed + class as u64, env.cancel)?;
        }
        env.fs.make_cold()?;
        Ok(())
    }

    fn run(&self, env: &Env<'_>, case: &Case) -> LabResult<CaseResult> {
        // The first case warms f1; later ones find it warm, and f2 and f3 as cold as ever.
        {
            let f1 = env.fs.open(path(0), OpenHow::Read)?;
            let mut buf = vec![0; MIB as usize];
            for at in (0..self.file_bytes[0] / 100 * WARM_PERCENT).step_by(MIB as usize) {
                f1.read_at(&mut buf, at)?;
            }
        }
        if case.mode == "raw" { self.raw(env) } else { self.serve(env, case) }
    }

    fn space_bytes(&self) -> u64 {
        self.file_bytes.iter().sum::<u64>() + (256 << 20)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tries_stop_where_they_do_not_pay_and_come_back_when_they_do() {
        let mut p = TryPolicy::default();
        let mut tried = 0;
        for _ in 0..1000 {
            if p.should_try() {
                tried += 1;
                p.learn(false);
            }
        }
        assert!((40..120).contains(&tried), "{tried} tries of 1000 that never hit");
        for _ in 0..200 {
            if p.should_try() {
                p.learn(true);
            }
        }
        assert!(p.should_try() && p.should_try(), "a file that hits again is tried every time");
    }

    /// The server gets to its work only when all of the time is over, as after a stall.
    #[test]
    fn what_became_due_before_the_end_is_carried_out_after_it() {
        use crate::disk::registry::Registry;
        use crate::run::Cancel;
        use crate::target::mounted::{Cold, MountedFs};
        use crate::target::{Fs, LabFile};
        let dir = std::env::temp_dir().join(format!("weir-lab-due-{}", std::process::id()));
        std::fs::create_dir_all(&dir).expect("made");
        let fs = Arc::new(MountedFs::new(dir.clone(), None, Cold::Advise));
        let (registry, cancel) = (Registry::new().expect("state directory"), Cancel::default());
        fill_file(&*fs, "f", MIB, 1, &cancel).expect("filled");
        let file: Arc<dyn LabFile> = fs.open("f", OpenHow::Read).expect("there");
        let env = Env {
            fs,
            seed: 1,
            cancel: &cancel,
            registry: &registry,
            daemons: &Vec::new,
            disks: &[],
        };
        let ago =
            |ms| Instant::now().checked_sub(Duration::from_millis(ms)).expect("booted by then");
        let span = Span { begun: ago(900), record_from: ago(600), end: ago(100) };
        for mode in ["pool", "async"] {
            let mut server = Server {
                env: &env,
                files: std::array::from_fn(|_| Arc::clone(&file)),
                source: Source::new(1, [MIB; 3]),
                recorders: std::array::from_fn(|_| Recorder::new(span.record_from)),
                tries: [Tries::default(); 3],
                policies: [TryPolicy::default(); 3],
                mode,
                buf: vec![0; REQUEST_BYTES as usize],
                outstanding: 0,
                span,
            };
            if mode == "async" {
                match server.asynchronous(Loop::Open(1000)) {
                    Err(LabError::NotOffered(_)) => continue,
                    other => other.expect("no error"),
                }
            } else {
                std::thread::scope(|scope| {
                    let (jobs, take) = mpsc::channel();
                    let (put, done) = mpsc::channel();
                    scope.spawn(move || pool_worker(&Mutex::new(take), &put));
                    server.pooled(&Pool { jobs, done }, Loop::Open(1000)).expect("no error");
                });
            }
            let recorded: u64 = server.recorders.iter().map(Recorder::count).sum();
            assert!((499..=501).contains(&recorded), "{mode}: {recorded} of 500 in 500 ms");
        }
        std::fs::remove_dir_all(dir).expect("removed");
    }

    #[test]
    fn requests_come_in_the_published_mixture() {
        let mut s = Source::new(1, [64 * MIB, 512 * MIB, 64 * MIB]);
        let mut counts = [0_u64; 3];
        for _ in 0..10_000 {
            let (class, offset) = s.next();
            assert!(offset % REQUEST_BYTES == 0 && offset < 512 * MIB);
            counts[class] += 1;
        }
        assert!(
            (7000..7600).contains(&counts[0]) && (1600..2000).contains(&counts[1]),
            "{counts:?}"
        );
    }
}
