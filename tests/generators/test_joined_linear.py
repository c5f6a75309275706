"""Query, key and value as one product in a compiled layer: the same results, from weights that the trainer owns."""

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx
from transformers import AutoModelForCausalLM, Qwen2Config

from oxrl.generators.embedded import joined_linear
from oxrl.generators.embedded.joined_linear import JoinLinears, join_weights
from oxrl.tensors import decoder_layers


@pytest.fixture
def model():
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=512, hidden_size=64, intermediate_size=160, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, tie_word_embeddings=True,
    )  # fmt: skip
    return AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval()


def test_products_of_one_input_become_one(model):
    join_weights(decoder_layers(model))
    attention = model.model.layers[0].self_attn
    projections = (attention.q_proj, attention.k_proj, attention.v_proj, attention.o_proj)
    parameters = [each for linear in projections[:3] for each in (linear.weight, linear.bias)]

    def layer(hidden, last, *parameters):
        flat = [hidden.view(-1, 64) for _ in range(3)]  # as each linear layer does for itself
        weights = [weight.permute(1, 0) for weight in parameters[::2]]
        products = [torch.addmm(*each) for each in zip(parameters[1::2], flat, weights, strict=True)]
        return [*products, torch.mm(products[0], last.permute(1, 0))]  # of another input

    inputs = (torch.randn(2, 5, 64, dtype=torch.bfloat16), attention.o_proj.weight.detach(), *parameters)
    traced = make_fx(layer, tracing_mode="fake")(*inputs)
    JoinLinears()(traced.graph)
    traced.graph.eliminate_dead_code()
    traced.recompile()
    targets = [node.target for node in traced.graph.nodes]
    assert targets.count(torch.ops.oxrl.joined_linear.default) == 1
    assert targets.count(torch.ops.aten.addmm.default) == 0 and targets.count(torch.ops.aten.mm.default) == 1
    for found, expected in zip(traced(*inputs), layer(*inputs), strict=True):
        torch.testing.assert_close(found, expected)


def test_joined_weights_are_the_models_own_before_and_after_a_step_of_an_optimizer(model, tmp_path):
    ids = torch.arange(3, 40)[None]
    before = model(ids).logits
    join_weights(decoder_layers(model))
    assert torch.equal(model(ids).logits, before)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    model(ids).logits.float().square().mean().backward()
    optimizer.step()
    attention = model.model.layers[1].self_attn
    weights = [attention.q_proj.weight, attention.k_proj.weight, attention.v_proj.weight]
    assert torch.equal(joined_linear._joined(weights), torch.cat(weights))
    assert joined_linear._joined(weights[::-1]) is None
    assert weights[0].untyped_storage().nbytes() == weights[0].nbytes  # saving one does not save its neighbours
    weights[1].data = weights[1].clone()
    assert joined_linear._joined(weights) is None
    model.save_pretrained(tmp_path)
    saved = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16).state_dict()
    assert all(torch.equal(value, saved[name]) for name, value in model.state_dict().items())
