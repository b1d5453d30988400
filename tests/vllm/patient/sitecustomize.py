"""For engines that share a few cores: vLLM's processes wait for each other without a core of their own.

They spin for a second after each message, which on two cores takes from whoever they wait for the time to answer.
"""

from __future__ import annotations

import os
import time

os.sched_yield = lambda: time.sleep(0.0002)
