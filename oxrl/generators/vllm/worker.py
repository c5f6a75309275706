"""What vLLM's own workers do for us after a reload, as an extension that they are started with.

vLLM (0.32) reloads the embedding of a model with tied weights and leaves its head alone. On a CPU the head has a packed
copy of the embedding, which would stay that of the old weights: without an error, and half of the model is stale.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from oxrl.types import Rendezvous
from oxrl.weights.broadcast import receive
from oxrl.weights.checkpoint_names import read_weights

EXTENSION = "oxrl.generators.vllm.worker.WorkerExtension"


class WorkerExtension:
    """Mixed into the worker's class; its methods can be called over `collective_rpc`."""

    def take_weights(self, folder: str) -> None:
        """The weights of a checkpoint folder; also where the engine was started with none to read."""
        worker: Any = self
        worker.reload_weights(weights_iterator=read_weights(Path(folder)))
        tie_head_again(worker.get_model())

    def receive_weights(self, place: list[Any], first: int) -> None:
        """Those that a trainer sends to a `Rendezvous`, where this engine's workers are receivers from `first` on."""
        worker: Any = self
        worker.reload_weights(weights_iterator=receive(Rendezvous(*place), first + worker.rank))
        tie_head_again(worker.get_model())

    def tie_head_again(self) -> bool:
        """Give a tied head the embedding's weights as they are now; says whether there was one."""
        worker: Any = self
        return tie_head_again(worker.get_model())


def tie_head_again(model: Any) -> bool:
    from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead, VocabParallelEmbedding

    heads = [module for module in model.modules() if isinstance(module, ParallelLMHead)]
    embeddings = [
        module
        for module in model.modules()
        if isinstance(module, VocabParallelEmbedding) and not isinstance(module, ParallelLMHead)
    ]
    config = model.config.get_text_config()
    if not config.tie_word_embeddings or len(heads) != 1 or len(embeddings) != 1:
        return False
    (head,), (embedding,) = heads, embeddings
    head.weight = embedding.weight
    head.quant_method.process_weights_after_loading(head)
    return True
