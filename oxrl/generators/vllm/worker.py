"""An extension of vLLM's workers that updates tied heads after weights were reloaded.

vLLM (0.32) reloads the embedding of a model with tied weights but not its head. On a CPU the head has a packed copy of
the embedding, which would keep the old weights: half of the model would be stale, without an error.
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
        """Load the weights of a checkpoint folder, also if the engine was started without any."""
        worker: Any = self
        worker.reload_weights(weights_iterator=read_weights(Path(folder)))
        tie_head_again(worker.get_model())

    def receive_weights(self, rendezvous: list[Any], first: int) -> None:
        """Load the weights that a trainer broadcasts; this engine's workers have the ranks from `first` on."""
        worker: Any = self
        worker.reload_weights(weights_iterator=receive(Rendezvous(*rendezvous), first + worker.rank))
        tie_head_again(worker.get_model())

    def tie_head_again(self) -> bool:
        """Give a tied head the embedding's current weights; return whether there was one."""
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
