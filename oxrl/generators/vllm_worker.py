"""The former path of `oxrl.generators.vllm.worker`, for servers that are started with it."""

from oxrl.generators.vllm.worker import WorkerExtension as WorkerExtension
