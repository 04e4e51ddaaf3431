"""Loads made of real programs. Each load has start(round); early_ends(), the names of
what is not running any more; ask_to_stop() before a clean unmount, or kill(); stop(), which
waits for the ends and returns problems; and check(round, clean), which returns (number of
acknowledged things, list of damages)."""

import contextlib
import glob
import multiprocessing
import os
import shutil
import signal
import sqlite3
import subprocess
import sys

import workloads
from targets import end_processes_below, run, wait_until

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "programs"))
import sqlite_load  # noqa: E402 - from the directory of the program suite

PG_BIN = "/usr/lib/postgresql/15/bin"
PG_CLIENTS = 4


def end(processes, limit_seconds=30):
    """The writers end by themselves when the mount dies; whoever does not is killed."""
    stuck = []
    for name, process in processes.items():
        process.join(limit_seconds)
        if process.is_alive():
            process.kill()
            process.join(10)
            stuck.append(name)
    return stuck


class Writers:
    """The writers of workloads.py, one directory for each round."""

    def __init__(self, mount, host, seed, count=1):
        self.mount, self.host, self.seed, self.count = mount, host, seed, count
        self.processes = {}

    def root(self, number):
        return os.path.join(self.mount, f"round{number:04d}")

    def histories(self, number):
        return os.path.join(self.host, f"history{number:04d}")

    def start(self, number):
        self.processes = workloads.start(self.root(number), self.histories(number),
                                         f"{self.seed}/{number}", count=self.count)

    def early_ends(self):
        return [name for name, process in self.processes.items() if not process.is_alive()]

    def ask_to_stop(self):
        for process in self.processes.values():
            process.terminate()

    def kill(self):
        for process in self.processes.values():
            process.kill()
            process.join()

    def stop(self):
        return [f"{name} did not end" for name in end(self.processes)]

    def check(self, number, clean=False):
        return workloads.check_all(self.root(number), self.histories(number),
                                   f"{self.seed}/{number}", clean, self.count)


class Sqlite:
    """Commits rows into a database in WAL mode and one with rollback journals."""

    MODES = ("wal", "delete")

    def __init__(self, mount, host, seed):
        self.mount, self.host, self.seed = mount, host, seed
        self.processes, self.acked, self.started = {}, {}, {}

    def database(self, mode):
        return os.path.join(self.mount, "sqlite", f"{mode}.db")

    def connect(self, mode):
        connection = sqlite_load.connect(self.database(mode), mode)
        # With a rollback journal, the commit is the removal of the journal; only EXTRA makes
        # that removal durable before the commit returns.
        connection.execute("PRAGMA synchronous=EXTRA")
        return connection

    def start(self, number):
        os.makedirs(os.path.join(self.mount, "sqlite"), exist_ok=True)
        workloads.sync_dir(self.mount)
        for mode in self.MODES:
            connection = self.connect(mode)
            connection.execute("CREATE TABLE IF NOT EXISTS counter (writer INTEGER, n INTEGER, "
                               "payload BLOB, PRIMARY KEY (writer, n))")
            connection.close()
            self.acked[mode, number] = multiprocessing.Value("q", 0, lock=False)
            self.processes[mode] = multiprocessing.Process(target=self.commit, args=(mode, number))
            self.processes[mode].start()

    def commit(self, mode, number):
        path = os.path.join(self.host, f"sqlite-{mode}-{number}")
        connection, count = self.connect(mode), 0
        rng = sqlite_load.random.Random(number)
        try:
            with open(path, "w", encoding="ascii", buffering=1) as log:
                while True:
                    connection.execute("INSERT INTO counter VALUES (?, ?, ?)",
                                       (number, count, rng.randbytes(rng.randrange(1, 3000))))
                    if mode == "delete":
                        # SQLite reports success if it removes the journal and then cannot open
                        # the directory to sync it: the mount has died in between.
                        os.close(os.open(os.path.dirname(self.database(mode)), os.O_RDONLY))
                    count += 1
                    log.write(f"a {count}\n")
                    self.acked[mode, number].value = count
        except (sqlite3.Error, OSError) as error:
            with open(path, "a", encoding="ascii") as log:
                log.write(f"e {error}\n")

    def early_ends(self):
        return [f"sqlite {mode}" for mode, process in self.processes.items()
                if not process.is_alive()]

    def ask_to_stop(self):
        for process in self.processes.values():
            process.kill()  # as good as any end: what was committed must be there
            process.join()

    kill = ask_to_stop

    def stop(self):
        return [f"sqlite {mode} did not end" for mode in end(self.processes)]

    def check(self, number, clean=False):
        del clean
        total, damages = 0, []
        for mode in self.MODES:
            expected = {n: value.value for (m, n), value in self.acked.items() if m == mode}
            total += expected.get(number, 0)
            try:
                connection = self.connect(mode)
                sqlite_load.integrity(connection)
                sqlite_load.check_counters(connection, expected)
                # What was found now is durable and has to stay.
                for writer in expected:
                    rows = connection.execute("SELECT count(*) FROM counter WHERE writer = ?",
                                              (writer,)).fetchone()[0]
                    self.acked[mode, writer].value = rows
                connection.close()
            except (AssertionError, sqlite3.Error, OSError) as problem:
                damages.append(f"sqlite {mode}: {problem}")
        return total, damages


class Fio:
    """fio as a load that moves much data, beside a file that it verified before."""

    def __init__(self, mount, host, seed):
        self.mount, self.host, self.seed = mount, host, seed
        self.loads = []
        self.made = False

    def command(self, name, *arguments):
        return ["fio", f"--name={name}", f"--directory={self.mount}/fio", "--verify_state_save=0",
                "--randrepeat=1", "--group_reporting", "--thread=0", *arguments]

    def base(self, *arguments):
        return self.command("base", "--size=24m", "--rw=randwrite", "--bs=8k", "--verify=crc32c",
                            "--verify_fatal=1", "--fallocate=none", "--end_fsync=1", *arguments)

    def start(self, number):
        os.makedirs(f"{self.mount}/fio", exist_ok=True)
        if not self.made:
            run(*self.base("--do_verify=1"))
            workloads.sync_dir(f"{self.mount}/fio")
            workloads.sync_dir(self.mount)
            self.made = True
        jobs = (("buffered", "--rw=randwrite", "--bs=16k", "--fsync=32", "--ioengine=psync"),
                ("direct", "--rw=write", "--bs=256k", "--direct=1", "--ioengine=libaio",
                 "--iodepth=4"))
        for name, *arguments in jobs:
            command = self.command(f"{name}{number % 3}", "--size=64m", "--time_based",
                                   "--runtime=600", *arguments)
            self.loads.append(subprocess.Popen(command, stdin=subprocess.DEVNULL, cwd="/",
                                               stdout=subprocess.DEVNULL,
                                               stderr=subprocess.DEVNULL,
                                               start_new_session=True))

    def early_ends(self):
        return ["fio" for load in self.loads if load.poll() is not None]

    def ask_to_stop(self):
        for load in self.loads:
            load.terminate()

    def kill(self):
        for load in self.loads:  # with the processes of its jobs
            with contextlib.suppress(ProcessLookupError):
                os.killpg(load.pid, signal.SIGKILL)

    def stop(self):
        stuck = []
        for load in self.loads:
            try:
                load.wait(30)
            except subprocess.TimeoutExpired:
                self.kill()
                stuck.append("fio did not end")
        self.loads = []
        return stuck

    def check(self, number, clean=False):
        del number, clean
        done = subprocess.run(self.base("--verify_only=1"), stdin=subprocess.DEVNULL, check=False,
                              capture_output=True, text=True, errors="replace")
        if done.returncode != 0:
            return 0, [f"fio: the verified file is damaged:\n{done.stderr[-2000:]}"]
        return 3072, []


class Postgres:
    """A PostgreSQL server under pgbench; one database over all rounds."""

    def __init__(self, mount, host, seed):
        self.mount, self.seed = mount, seed
        self.data = os.path.join(mount, "postgres")
        self.run_dir = os.path.join(host, "postgres")
        self.load = None
        self.made, self.base, self.postmaster = False, 0, 0

    def as_postgres(self, *command, **named):
        return ["runuser", "-u", "postgres", "--", "env", f"PGHOST={self.run_dir}", "PGPORT=5498",
                "LC_ALL=C.UTF-8", *command]

    def sql(self, text, database="bench"):
        return run(*self.as_postgres("psql", "-XAtq", "-v", "ON_ERROR_STOP=1", "-d", database,
                                     "-c", text)).stdout.strip()

    def start_server(self):
        for path in glob.glob(f"{self.run_dir}/.s.PGSQL.5498*"):
            os.unlink(path)
        options = (f"-k {self.run_dir} -p 5498 -c listen_addresses='' -c max_wal_size=64MB "
                   "-c shared_buffers=16MB -c checkpoint_timeout=30s")
        run(*self.as_postgres(f"{PG_BIN}/pg_ctl", "-D", self.data, "-w", "-t", "60", "-s", "start",
                              "-l", f"{self.run_dir}/server.log", "-o", options))

        with open(f"{self.data}/postmaster.pid", encoding="ascii") as file:
            self.postmaster = int(file.readline())

    def stop_server(self):
        run(*self.as_postgres(f"{PG_BIN}/pg_ctl", "-D", self.data, "-m", "fast", "-w", "-s", "stop"))

    def make(self):
        for path in (self.run_dir, self.data):
            os.makedirs(path, mode=0o700)
            shutil.chown(path, "postgres", "postgres")
        run(*self.as_postgres(f"{PG_BIN}/initdb", "-k", "-D", self.data, "-U", "postgres", "-A",
                              "trust", "--locale=C.UTF-8"))
        workloads.sync_dir(self.mount)
        self.start_server()
        self.sql("CREATE DATABASE bench", "postgres")
        run(*self.as_postgres(f"{PG_BIN}/pgbench", "-q", "-i", "-s", "2", "bench"))
        self.made = True

    def start(self, number):
        del number
        if self.made:
            self.start_server()
        else:
            self.make()
        self.base = int(self.sql("SELECT count(*) FROM pgbench_history"))
        self.clear_logs()
        self.load = subprocess.Popen(
            self.as_postgres("bash", "-c", f"cd {self.run_dir} && exec {PG_BIN}/pgbench -n "
                             f"-c {PG_CLIENTS} -j 2 -T 600 --log --log-prefix=log bench"),
            stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, cwd="/")

    def clear_logs(self):
        for path in glob.glob(f"{self.run_dir}/log.*"):
            os.unlink(path)

    def early_ends(self):
        return ["pgbench"] if self.load.poll() is not None else []

    def ask_to_stop(self):
        self.stop_server()

    def kill(self):
        end_processes_below(self.data)

    def stop(self):
        end_processes_below(self.data)
        # A new server refuses to start while a process of that number exists.
        wait_until(lambda: not os.path.exists(f"/proc/{self.postmaster}"), 30,
                   "the end of the PostgreSQL server")
        stuck = []
        try:
            self.load.wait(30)
        except subprocess.TimeoutExpired:
            self.load.kill()
            self.load.wait()
            stuck.append("pgbench did not end")
        return stuck

    def acknowledged(self):
        lines = 0
        for path in glob.glob(f"{self.run_dir}/log.*"):
            with open(path, "rb") as file:
                lines += file.read().count(b"\n")
        return lines

    def check(self, number, clean=False):
        del number, clean
        acked, damages = self.acknowledged(), []
        try:
            self.start_server()
            found = int(self.sql("SELECT count(*) FROM pgbench_history"))
            if not self.base + acked <= found <= self.base + acked + 2 * PG_CLIENTS:
                damages.append(f"postgres: {found} transactions in the history, {self.base} before "
                               f"and {acked} acknowledged in this round")
            sums = self.sql("SELECT (SELECT sum(abalance) FROM pgbench_accounts), "
                            "(SELECT sum(bbalance) FROM pgbench_branches), "
                            "(SELECT sum(tbalance) FROM pgbench_tellers), "
                            "(SELECT coalesce(sum(delta), 0) FROM pgbench_history)").split("|")
            if len(set(sums)) != 1:
                damages.append(f"postgres: the books do not balance: {sums}")
            run(*self.as_postgres(f"{PG_BIN}/pg_amcheck", "--install-missing", "--heapallindexed",
                                  "-d", "bench"))
            self.stop_server()
            self.base = found
            self.clear_logs()
        except Exception as problem:  # noqa: B902 - any refusal to start is the finding
            damages.append(f"postgres: {problem}")
        return acked, damages
