#!/bin/bash
# PostgreSQL 15: initdb with data checksums, pgbench, pg_amcheck, dump and restore, and a
# kill -9 of the whole server in the middle of a pgbench run, after which every acknowledged
# transaction must be there and the books must balance. Runs as the user postgres.
source "$(dirname "${BASH_SOURCE[0]}")/lib.sh"

PGBIN=/usr/lib/postgresql/15/bin
SCALE=10 SECONDS_OF_LOAD=12
((QUICK)) && SCALE=4 SECONDS_OF_LOAD=5

# Both servers of two suites may run at once: the socket's directory tells them apart.
as_postgres() { (cd / && exec runuser -u postgres -- env PGHOST="$STATE/run" PGPORT=5499 LC_ALL=C.UTF-8 "$@"); }
sql() { as_postgres psql -XAtq -v ON_ERROR_STOP=1 -d "${2:-bench}" -c "$1"; }

start_server() {
    as_postgres "$PGBIN/pg_ctl" -D "$WORK/data" -l "$STATE/run/server.log" -w -t 60 -s start \
        -o "-k $STATE/run -p 5499 -c listen_addresses='' -c max_wal_size=128MB -c shared_buffers=32MB \
            -c checkpoint_timeout=30s -c wal_compression=off" ||
        { tail -n 50 "$STATE/run/server.log"; die "the server does not start"; }
}

stop_server() { as_postgres "$PGBIN/pg_ctl" -D "$WORK/data" -m fast -w -s stop; }

# kill -9 of the postmaster and all its children at once, as a power cut would.
kill_server() {
    local master pids
    master=$(head -n 1 "$WORK/data/postmaster.pid")
    kill -STOP "$master"
    pids=$(pgrep -P "$master" | tr '\n' ' ')
    # shellcheck disable=SC2086
    kill -9 "$master" $pids
    while kill -0 "$master" 2>/dev/null; do sleep 0.05; done
    rm -f "$STATE/run"/.s.PGSQL.5499*
}

# If the script fails in the middle, no server may stay behind on the mount.
cleanup() {
    if [[ -s $WORK/data/postmaster.pid ]] && kill -0 "$(head -n 1 "$WORK/data/postmaster.pid")" 2>/dev/null; then
        kill_server || true
    fi
}

check_books() { # the invariant of pgbench: all sums are equal
    local sums
    sums=$(sql "SELECT (SELECT sum(abalance) FROM pgbench_accounts) || ' ' ||
                       (SELECT sum(bbalance) FROM pgbench_branches) || ' ' ||
                       (SELECT sum(tbalance) FROM pgbench_tellers) || ' ' ||
                       (SELECT coalesce(sum(delta), 0) FROM pgbench_history)")
    # shellcheck disable=SC2086
    [[ $(printf '%s\n' $sums | sort -u | wc -l) == 1 ]] || die "the books do not balance: $sums"
}

check_structure() {
    as_postgres "$PGBIN/pg_amcheck" --install-missing --heapallindexed --parent-check -d bench ||
        die "pg_amcheck found damage"
}

history_rows() { sql 'SELECT count(*) FROM pgbench_history'; }
content_hash() { as_postgres pg_dump -d "${1:-bench}" --no-comments | grep -v '^\\\(un\)\?restrict' | sha256sum | cut -d' ' -f1; }

load() { # SECONDS: pgbench, a line in $STATE/run/log.* for each acknowledged transaction
    as_postgres bash -c "cd $STATE/run && exec $PGBIN/pgbench -n -c 4 -j 2 -T $1 --log --log-prefix=log bench" \
        >"$STATE/pgbench.log" 2>&1
}

exercise() {
    trap cleanup EXIT
    mkdir -p "$STATE/run" "$WORK/data"
    chmod 755 "$STATE" "$(dirname "$STATE")"
    chown postgres: "$STATE/run" "$WORK/data"
    chmod 700 "$WORK/data"
    as_postgres "$PGBIN/initdb" -k -D "$WORK/data" -U postgres -A trust --locale=C.UTF-8 >"$STATE/initdb.log" 2>&1 ||
        { cat "$STATE/initdb.log"; die "initdb"; }
    start_server
    sql 'CREATE DATABASE bench' postgres
    as_postgres "$PGBIN/pgbench" -q -i -s "$SCALE" --foreign-keys bench >"$STATE/init.log" 2>&1 ||
        { cat "$STATE/init.log"; die "pgbench -i"; }

    load "$SECONDS_OF_LOAD" || { cat "$STATE/pgbench.log"; die "pgbench"; }
    same "transactions in the history" "$(cat "$STATE"/run/log.* | wc -l)" "$(history_rows)"
    check_books

    # The whole server dies under load, twice; the second time soon after the recovery.
    local round pause acknowledged found
    for pause in 4 1.5; do
        load 600 &
        round=$!
        sleep "$pause"
        kill_server
        wait "$round" && die "pgbench did not notice that the server died"
        start_server
        acknowledged=$(cat "$STATE"/run/log.* | wc -l)
        found=$(history_rows)
        echo "after kill -9: $acknowledged transactions acknowledged, $found found"
        ((found >= acknowledged && found <= acknowledged + 8)) || die "transactions were lost or invented"
        check_books
    done
    check_structure

    # Dump, restore into another database, dump that.
    sql 'CREATE DATABASE copy' postgres
    as_postgres pg_dump -d bench | as_postgres psql -Xq -v ON_ERROR_STOP=1 -d copy >/dev/null
    note dump "$(content_hash bench)"
    same "dump of the restored database" "$(noted dump)" "$(content_hash copy)"
    note history "$(history_rows)"
    stop_server
    as_postgres "$PGBIN/pg_checksums" -c -D "$WORK/data" >"$STATE/checksums.log" 2>&1 ||
        { cat "$STATE/checksums.log"; die "pg_checksums"; }
}

verify() {
    trap cleanup EXIT
    as_postgres "$PGBIN/pg_checksums" -c -D "$WORK/data" >"$STATE/checksums.log" 2>&1 ||
        { cat "$STATE/checksums.log"; die "pg_checksums"; }
    start_server
    same "dump after the remount" "$(noted dump)" "$(content_hash bench)"
    same "transactions in the history" "$(noted history)" "$(history_rows)"
    check_books
    check_structure
    rm -f "$STATE"/run/log.*
    load 2 || { cat "$STATE/pgbench.log"; die "pgbench"; }
    check_books
    stop_server
}

run_phases "$@"
