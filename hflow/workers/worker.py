"""`Worker`: one device's process, or all of them in one. A message comes in, a part acts on it.

    open_groups         sources: encode on a thread, generate on the engines' loop
    compute             the pool of body processes; encode for views
    poll                the mailbox of what happened since
    run                 batch nodes: infer, train, compute
    export, receive     the store, packed
    publish, wake       weights out of a training replica, into a generation replica
    sleep               engines stop, unfinished samples stay
    release, summarize  the store
    save                a model and its tokenizer
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

from hflow.errors import HflowError, RunError
from hflow.plan.ir import Replica
from hflow.workers.base import ComputeOrder, GroupOrder, NodeResult, NodeTask, Report, Span, WorkerSetup
from hflow.workers.batch_nodes import BatchNodes
from hflow.workers.blame import blame
from hflow.workers.compute import Computes
from hflow.workers.rows import DatasetRows
from hflow.workers.encoding import Encoder
from hflow.workers.engines import Engines
from hflow.workers.mailbox import Mailbox
from hflow.workers.replicas import build_backends, build_engines, build_tokenizers
from hflow.workers.store import Store
from hflow.workers.transfer import Parcel, pack, unpack
from hflow.workers.weights import Bucket, pack_buckets, unpack_bucket
from hflow.workers.world import Membership, World
