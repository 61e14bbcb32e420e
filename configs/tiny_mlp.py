"""A multilayer perceptron that predicts each token from the last eight.

Command:   python -m jaxft.main --config=configs/tiny_mlp.py --workdir=/tmp/jaxft-mlp
Hardware:  one CPU core; no download
Time:      seconds
Expected:  held-out loss from about 5.5 to 1.5 nats a token
Survives:  a kill, Ctrl-C or SIGTERM at any moment: give the same command again
"""

from jaxft.config import Config, Corpus


def get_config() -> Config:
    """The smallest run that does everything."""
    config = Config()
    config.model.factory = "jaxft.models.mlp:make_model"
    config.model.width = 32
    config.model.num_layers = 2
    config.loss.factory = "jaxft.models.mlp:softmax_loss"
    config.optimizer.warmup_steps = 20
    config.data.corpus = Corpus.SYNTHETIC
    config.data.seq_len = 32
    config.data.global_batch = 16
    config.train.clip_norm = 1.0
    config.train.num_steps = 200
    config.eval.every_steps = 50
    config.checkpoint.save = "steps(50)"
    return config
