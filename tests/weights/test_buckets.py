"""Weights in buckets come out as they went in."""

import torch

from oxrl.weights.buckets import in_buckets


def test_every_tensor_is_restored_whatever_its_dtype_and_layout():
    torch.manual_seed(0)
    weights = {
        "a": torch.randn(3, 5),
        "half": torch.randn(7).bfloat16(),
        "turned": torch.randn(4, 6).t(),
        "one": torch.tensor(3.5, dtype=torch.float64),
        "large": torch.randn(100),
        "whole": torch.arange(5),
    }
    buckets = list(in_buckets(weights.items(), max_bytes=200))
    assert [[slot.name for slot in bucket.slots] for bucket in buckets] == [
        ["a", "half", "turned", "one"],
        ["large"],
        ["whole"],
    ]
    assert len(list(in_buckets(weights.items(), max_bytes=200, keep=False))) == len(buckets)
    found = [each for bucket in buckets for each in bucket.tensors()]
    assert [name for name, _ in found] == list(weights)
    for name, tensor in found:
        assert tensor.dtype == weights[name].dtype and torch.equal(tensor, weights[name]), name


def test_no_weights_make_no_bucket():
    assert list(in_buckets([])) == []
