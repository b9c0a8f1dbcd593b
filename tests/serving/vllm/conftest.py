"""Settings of vLLM for tests: one process, no compilation, no threads, no network. Tests skip where it is missing."""

from __future__ import annotations

import os
from importlib.util import find_spec

if find_spec("vllm") is not None:
    os.environ |= {
        "HF_HUB_OFFLINE": "1",
        "TORCHDYNAMO_DISABLE": "1",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_LOGGING_LEVEL": "ERROR",
        "VLLM_NO_USAGE_STATS": "1",
    }
