#!/bin/bash
# The image of a mounted volume when the host answers EIO: see host_faults.py.
# usage: host_eio.sh --weir BIN [--case NAME] [--seed N]   (or --fs xfs|ext4)
exec python3 "$(dirname "${BASH_SOURCE[0]}")/host_faults.py" eio "$@"
