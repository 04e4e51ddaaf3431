#!/usr/bin/env python3
"""A database load for SQLite whose result is known.

usage: sqlite_load.py exercise|verify DATABASE JOURNAL_MODE TRANSACTIONS STATE.json

exercise: TRANSACTIONS transactions, all applied to DATABASE and to a copy in memory, and both
compared; then several processes at once, each counting its acknowledged commits; then a
writer that is killed and whose acknowledged commits must be there. verify: the content is
what exercise left.
"""

import hashlib
import json
import multiprocessing
import os
import random
import signal
import sqlite3
import sys
import time

WRITERS = 3

SCHEMA = """
CREATE TABLE account (id INTEGER PRIMARY KEY, owner TEXT NOT NULL, balance INTEGER NOT NULL);
CREATE TABLE transfer (id INTEGER PRIMARY KEY, source INTEGER REFERENCES account,
    target INTEGER REFERENCES account, amount INTEGER, note BLOB);
CREATE INDEX transfer_by_source ON transfer (source, amount);
CREATE TABLE counter (writer INTEGER, n INTEGER, payload BLOB, PRIMARY KEY (writer, n));
"""


def connect(path, journal):
    connection = sqlite3.connect(path, timeout=60, isolation_level=None)
    mode = connection.execute(f"PRAGMA journal_mode={journal}").fetchone()[0]
    assert mode in (journal, "memory"), f"journal mode is {mode} instead of {journal}"
    connection.execute("PRAGMA synchronous=FULL")
    connection.execute("PRAGMA cache_size=-512")  # small, so that reads reach the files
    return connection


def digest(connection, tables=("account", "transfer", "counter")):
    total = hashlib.sha256()
    for table in tables:
        for row in connection.execute(f"SELECT * FROM {table} ORDER BY 1, 2"):
            total.update(repr(row).encode())
    return total.hexdigest()


def integrity(connection):
    verdict = connection.execute("PRAGMA integrity_check").fetchall()
    assert verdict == [("ok",)], f"integrity_check: {verdict[:5]}"


def transaction(rng):
    """The statements of one transaction, the same for the file and for the copy."""
    kind = rng.random()
    source, target, amount = rng.randrange(200), rng.randrange(200), rng.randrange(1000)
    if kind < 0.85:
        yield "UPDATE account SET balance = balance - ? WHERE id = ?", (amount, source)
        yield "UPDATE account SET balance = balance + ? WHERE id = ?", (amount, target)
        yield ("INSERT INTO transfer (source, target, amount, note) VALUES (?, ?, ?, ?)",
               (source, target, amount, rng.randbytes(rng.choice((10, 300, 6000)))))
    elif kind < 0.95:
        yield "DELETE FROM transfer WHERE id % 50 = ?", (rng.randrange(50),)
    else:
        yield ("UPDATE transfer SET note = zeroblob(?) WHERE source = ?",
               (rng.choice((0, 100, 20000)), source))


def shadowed(path, journal, count):
    """`count` transactions on the file and on a copy in memory; both must agree."""
    rng = random.Random(f"{journal}-{count}")
    disk, memory = connect(path, journal), connect(":memory:", "memory")
    for connection in (disk, memory):
        connection.executescript(SCHEMA)
        connection.executemany("INSERT INTO account VALUES (?, ?, 1000000)",
                               [(n, f"owner {n}") for n in range(200)])
    for number in range(count):
        end = "ROLLBACK" if rng.random() < 0.05 else "COMMIT"
        statements = list(transaction(rng))
        for connection in (disk, memory):
            connection.execute("BEGIN IMMEDIATE")
            for text, values in statements:
                connection.execute(text, values)
            connection.execute(end)
        if number == count // 2:
            disk.execute("VACUUM")
            disk.close()
            disk = connect(path, journal)
    assert digest(disk) == digest(memory), "the file differs from the copy in memory"
    balance = disk.execute("SELECT sum(balance) FROM account").fetchone()[0]
    assert balance == 200 * 1000000, f"the balances sum to {balance}"
    integrity(disk)
    disk.close()


def write_counters(path, journal, writer, count, acknowledged):
    """Commits n = 0, 1, ... and raises `acknowledged` to the number of commits after each."""
    rng = random.Random(writer)
    connection = connect(path, journal)
    for n in range(count):
        connection.execute("INSERT INTO counter VALUES (?, ?, ?)",
                           (writer, n, rng.randbytes(rng.randrange(1, 3000))))
        acknowledged.value = n + 1
    connection.close()


def check_counters(connection, expected):
    """Every acknowledged commit is present (one more may be), unbroken, with its payload."""
    for writer, count in expected.items():
        rng = random.Random(int(writer))
        rows = connection.execute("SELECT n, payload FROM counter WHERE writer = ? ORDER BY n",
                                  (int(writer),)).fetchall()
        assert count <= len(rows) <= count + 1, \
            f"writer {writer}: {count} commits acknowledged, {len(rows)} found"
        for n, (found, payload) in enumerate(rows):
            assert found == n and payload == rng.randbytes(rng.randrange(1, 3000)), \
                f"writer {writer}: row {n} is wrong"


def counter():
    """A number that one process raises and another reads. It has no lock, which a writer that is killed would take along."""
    return multiprocessing.Value("q", 0, lock=False)


def exercise(path, journal, count):
    shadowed(path, journal, count)
    expected, workers = {}, []
    for writer in range(WRITERS):
        acknowledged = counter()
        worker = multiprocessing.Process(
            target=write_counters, args=(path, journal, writer, count // 8, acknowledged))
        workers.append((writer, worker, acknowledged))
        worker.start()
    for writer, worker, acknowledged in workers:
        worker.join()
        assert worker.exitcode == 0 and acknowledged.value == count // 8, f"writer {writer} failed"
        expected[writer] = acknowledged.value
    # A writer killed in the middle: the next one to open the database recovers it.
    for writer in range(WRITERS, WRITERS + 3):
        acknowledged = counter()
        worker = multiprocessing.Process(
            target=write_counters, args=(path, journal, writer, 10**9, acknowledged))
        worker.start()
        while acknowledged.value < 20:
            time.sleep(0.01)
        os.kill(worker.pid, signal.SIGKILL)
        worker.join()
        expected[writer] = acknowledged.value
        connection = connect(path, journal)
        integrity(connection)
        check_counters(connection, expected)
        connection.close()
    return expected


def main():
    phase, path, journal, count, state = sys.argv[1:]
    if phase == "exercise":
        expected = exercise(path, journal, int(count))
        connection = connect(path, journal)
        with open(state, "w", encoding="ascii") as file:
            json.dump({"digest": digest(connection), "expected": expected}, file)
    else:
        with open(state, encoding="ascii") as file:
            noted = json.load(file)
        connection = connect(path, journal)
        integrity(connection)
        check_counters(connection, noted["expected"])
        assert digest(connection) == noted["digest"], "the content has changed"
    connection.close()
    print(f"sqlite {journal}: {phase} ok")


if __name__ == "__main__":
    main()
