"""Stands where the host of the store outside the ranks is; fake ranks need none."""

from __future__ import annotations

import argparse
import signal

from keepstep import linux

if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--fd", type=int)
    parser.add_argument("--parent", type=int)
    linux.die_with_parent(parser.parse_args().parent)
    while True:
        signal.pause()
