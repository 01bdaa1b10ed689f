"""A rank assignment that counts ranks by node raises TypeError with newer releases of torch.

    python store_barrier.py

NVRx's store classes derive from torch's first and from NVRx's mixin second. torch's ``Store`` has
got a ``barrier`` method of its own, which now hides NVRx's.
"""

from __future__ import annotations

import os

from ranks import free_port, verdict


def main() -> None:
    from nvidia_resiliency_ext.inprocess.rank_assignment import (
        FilterCountGroupedByKey,
        RankAssignmentCtx,
    )
    from nvidia_resiliency_ext.inprocess.state import State
    from nvidia_resiliency_ext.inprocess.store import TCPStore

    os.environ.update(RANK="0", WORLD_SIZE="1")
    store = TCPStore("127.0.0.1", free_port(), 1)
    whole_node = FilterCountGroupedByKey(key_or_fn="node", condition=lambda count: count == 1)
    try:
        whole_node(RankAssignmentCtx(State(rank=0, world_size=1), store, set()))
    except TypeError as error:
        verdict(True, str(error).splitlines()[0])
    verdict(False, "ranks were counted")


if __name__ == "__main__":
    main()
