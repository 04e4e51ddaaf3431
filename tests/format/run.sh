#!/bin/bash
# A second reader, made from docs/FORMAT.md alone, reads what the engine has written: see suite.py.
# usage: run.sh --weir BIN [--quick] [--seed N] [--seeds N] [--mount-arg ARG]
# The python3 of Debian: its packages are not there for another one.
exec /usr/bin/python3 "$(dirname "${BASH_SOURCE[0]}")/suite.py" "$@"
