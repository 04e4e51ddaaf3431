#!/bin/bash
# SQLite with a write-ahead log and with rollback journals: thousands of transactions, several
# processes, a killed writer, PRAGMA integrity_check, and the content compared with a copy of
# the database that was kept in memory (see sqlite_load.py).
source "$(dirname "${BASH_SOURCE[0]}")/lib.sh"

JOURNALS=(wal delete truncate persist)

exercise() {
    local journal transactions=2500
    ((QUICK)) && transactions=1000
    for journal in "${JOURNALS[@]}"; do
        python3 "$LIB_DIR/sqlite_load.py" exercise "$WORK/$journal.db" "$journal" \
            "$transactions" "$STATE/$journal.json"
    done
}

verify() {
    local journal verdict
    for journal in "${JOURNALS[@]}"; do
        # The shell tool is another build of SQLite than Python's, and a second opinion.
        verdict=$(sqlite3 "$WORK/$journal.db" 'PRAGMA integrity_check; PRAGMA foreign_key_check;')
        same "integrity_check of $journal.db" ok "$verdict"
        python3 "$LIB_DIR/sqlite_load.py" verify "$WORK/$journal.db" "$journal" 0 "$STATE/$journal.json"
    done
}

run_phases "$@"
