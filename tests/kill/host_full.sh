#!/bin/bash
# The image of a mounted volume when the host file system is full: see host_faults.py.
# usage: host_full.sh --weir BIN [--case NAME] [--seed N]   (or --fs xfs|ext4)
exec python3 "$(dirname "${BASH_SOURCE[0]}")/host_faults.py" full "$@"
