"""A byte-level language model on the source text of Python's standard library.

Command:   python -m jaxft.main --config=configs/tiny_lm.py --workdir=/tmp/jaxft-demo
Hardware:  two CPU cores; no download
Time:      under three minutes
Expected:  held-out bits per byte from about 8 to under 3.2
Survives:  a kill, Ctrl-C or SIGTERM at any moment: give the same command again
"""

from jaxft.config import Config


def get_config() -> Config:
    """The demo run."""
    config = Config()
    config.model.width = 128
    config.model.num_layers = 2
    config.model.num_heads = 4
    config.remat.plan = "names(attn,up)"
    config.data.seq_len = 128
    config.data.global_batch = 16
    config.optimizer.warmup_steps = 20
    config.train.clip_norm = 1.0
    config.train.num_steps = 400
    config.eval.every_steps = 100
    config.checkpoint.save = "steps(50)"
    return config
