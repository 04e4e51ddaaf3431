#!/bin/bash
# A second reader, made from docs/FORMAT.md alone, reads what the engine has written: see suite.py.
# usage: run.sh --weir BIN [--quick] [--seed N] [--seeds N] [--mount-arg ARG]
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
python=/usr/bin/python3 # Debian's own: its packages are not there for another one
"$python" -c 'import crc32c, xxhash' 2>/dev/null || {
    echo "run.sh: needs python3-crc32c and python3-xxhash, see tests/programs/install.sh" >&2
    exit 2
}
exec "$python" "$here/suite.py" "$@"
