"""Fine-tunes the language model of `tiny_lm.py` by low-rank adapters.

Command:   python -m jaxft.main --config=configs/tiny_lora.py --workdir=/tmp/jaxft-lora
Hardware:  two CPU cores; no download
Time:      under two minutes
Expected:  checkpoints of which only the adapters are written; the rest are hard links
Survives:  what `tiny_lm.py` survives
"""

from jaxft.config import Config, Corpus


def get_config() -> Config:
    """The demo run."""
    config = Config()
    config.model.factory = "jaxft.models.lora:make_model"
    config.model.options.rank = 4
    config.loss.factory = ""
    config.model.width = 128
    config.model.num_layers = 2
    config.model.num_heads = 4
    config.data.corpus = Corpus.STDLIB
    config.data.seq_len = 128
    config.data.global_batch = 16
    config.optimizer.trainable = "lora/**"
    config.optimizer.warmup_steps = 20
    config.train.clip_norm = 1.0
    config.train.num_steps = 200
    config.eval.every_steps = 100
    config.checkpoint.save = "steps(25)"
    return config
