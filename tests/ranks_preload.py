"""What the server process of ranks.py imports once, before it forks ranks. No torch call is made:
a thread pool would not survive the fork."""

from canon_pretrain.titan.device import prepare_device

prepare_device()

import canon_pretrain.titan.spec  # noqa: E402
import canon_pretrain.titan.trainer  # noqa: E402, F401
