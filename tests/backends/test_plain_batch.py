"""Plain loops: a dict of tensors through a backend, and losses and schedulers in a loop of torch alone."""

import pytest
import torch

import oxrl
from oxrl.backends.local import PyTorchTrainingBackend, create_cross_entropy_loss, create_pytorch_backend
from oxrl.backends.optimizer import create_adamw_optimizer, create_warmup_cosine_scheduler
from oxrl.models.load import load_model

pytestmark = pytest.mark.anyio
TOKENS = torch.tensor([[1, 5, 6, 7, 9], [1, 8, 9, 0, 0]])
MASK = torch.tensor([[1, 0, 1, 1, 0], [0, 1, 1, 0, 0]])  # the first token has no context: its 1 does not count
ADVANTAGES = torch.tensor([1.5, -0.5])


@pytest.fixture
def anyio_backend():
    return "asyncio"


def expected(model, advantages):
    """Mean of -A log p over trained tokens, in float64, and its gradient."""
    logprob = model(TOKENS).logits.double().log_softmax(-1)
    terms = [-advantages[b] * logprob[b, s - 1, TOKENS[b, s]] for b in range(2) for s in range(1, 5) if MASK[b, s]]
    loss = torch.stack(terms).mean()
    loss.backward()
    return loss.item(), {name: weight.grad.clone() for name, weight in model.named_parameters()}


@pytest.mark.parametrize("advantages", [None, ADVANTAGES, ADVANTAGES[:, None].expand(2, 5)])
@pytest.mark.parametrize("as_lists", [False, True])
async def test_a_dict_of_tokens_and_masks_is_a_step(advantages, as_lists):
    batch = {"tokens": TOKENS, "labels": TOKENS.masked_fill(TOKENS == 0, -100), "loss_mask": MASK}
    batch |= {} if advantages is None else {"advantages": advantages}
    if as_lists:  # of different lengths
        batch = {"tokens": [TOKENS[0].tolist(), [1, 8, 9]], "loss_mask": [MASK[0].tolist(), [0, 1, 1]]}
        batch |= {} if advantages is None else {"advantages": ADVANTAGES.tolist()}
    loss, gradient = expected(load_model("tiny"), torch.ones(2) if advantages is None else ADVANTAGES)
    backend = create_pytorch_backend(load_model("tiny"))
    metrics = await backend.forward_backward(batch)
    assert metrics["loss"] == pytest.approx(loss, rel=1e-5)
    for name, weight in backend.model.named_parameters():
        torch.testing.assert_close(weight.grad, gradient[name], atol=1e-6, rtol=1e-3)
    assert (await backend.optim_step())["grad_norm"] > 0


async def test_samples_and_rewards_are_a_step():
    samples = [
        oxrl.Sample(prompt="?", tokens=TOKENS[b].tolist(), loss_mask=MASK[b].tolist(), group_index=0) for b in range(2)
    ]
    items = oxrl.prepare_grpo_batch(samples, [1.0, 0.0], baseline=0.25)
    loss, _ = expected(load_model("tiny"), torch.tensor([0.75, -0.25]))
    metrics = await create_pytorch_backend(load_model("tiny")).forward_backward(items)
    assert metrics["loss"] == pytest.approx(loss, rel=1e-5)
    rows = [row for item in oxrl.prepare_grpo_batch(samples, [1.0, 0.0]) for row in item]
    zscores = [row.streams["advantage"][row.mask].tolist() for row in rows]
    assert zscores == [pytest.approx([each] * 2, abs=1e-5) for each in (0.5**0.5, -(0.5**0.5))], "no baseline: GRPO's"
    with pytest.raises(ValueError, match="1 rewards for 2 rollouts"):
        oxrl.prepare_grpo_batch(samples, [1.0])


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"labels": TOKENS.roll(-1, 1)}, "row 0: labels differ from tokens .* set labels to tokens"),
        ({"loss_mask": torch.zeros(2, 5)}, "no token of the batch is trained on"),
        ({"loss_mask": 0.5 * MASK}, "loss_mask has a 0 or a 1 for each of its 5 tokens"),
        ({"advantages": torch.ones(3)}, "different numbers of rows: tokens 2, loss_mask 2, advantages 3"),
        ({"input_ids": TOKENS}, "the batch has 'input_ids'; it takes tokens, loss_mask, labels, advantages"),
    ],
)
async def test_an_invalid_dict_is_refused(wrong, message):
    backend = create_pytorch_backend(load_model("tiny"))
    with pytest.raises(ValueError, match=message):
        await backend.forward_backward({"tokens": TOKENS, "loss_mask": MASK, **wrong})


async def test_a_handle_of_weights_is_refused_where_a_copy_is_meant():
    backend = create_pytorch_backend(load_model("tiny"))
    with pytest.raises(ValueError, match="a handle of the current weights, not a copy"):
        await backend.load_weights(await backend.get_weights())


def test_the_cross_entropy_of_logits_is_that_of_torch():
    logits = torch.randn(2, 5, 11, generator=torch.Generator().manual_seed(0), dtype=torch.float32, requires_grad=True)
    labels = TOKENS.masked_fill(TOKENS == 9, -100)
    loss = create_cross_entropy_loss()(logits, labels, MASK)
    trained = labels.masked_fill(MASK == 0, -100)[:, 1:]
    wanted = torch.nn.functional.cross_entropy(logits[:, :-1].double().reshape(-1, 11), trained.reshape(-1))
    assert loss.item() == pytest.approx(wanted.item(), rel=1e-6)
    loss.backward()
    assert logits.grad.abs().sum() > 0
    with pytest.raises(ValueError, match="no token is trained on"):
        create_cross_entropy_loss()(logits, labels, torch.zeros(2, 5))


async def test_the_torch_scheduler_has_the_rates_of_the_backend():
    model = load_model("tiny")
    optimizer = create_adamw_optimizer(model, lr=1e-3)
    scheduler = create_warmup_cosine_scheduler(optimizer, 2, 6)
    rates = []
    for _ in range(6):
        rates.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    factor = create_warmup_cosine_scheduler(num_warmup_steps=2, num_training_steps=6)
    assert rates == pytest.approx([1e-3 * factor(step) for step in range(6)])
    backend = PyTorchTrainingBackend(model, optimizer, create_warmup_cosine_scheduler(optimizer, 2, 6))
    await backend.forward_backward({"tokens": TOKENS, "loss_mask": MASK})
    assert (await backend.optim_step())["lr"] == pytest.approx(1e-3 / 3)
    with pytest.raises(ValueError, match="StepLR has no function of the step"):
        PyTorchTrainingBackend(model, optimizer, torch.optim.lr_scheduler.StepLR(optimizer, 2))
