"""InfoNCE beside a reference in plain loops, over ranks too; recall and its ties."""

import math
import threading

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.testing._internal.distributed import multi_threaded_pg as threaded

from dd_lightning.tasks.vision_language import VisionLanguageModule
from dd_lightning.tasks.vision_language.contrast import info_nce, recalls
from dd_lightning.tasks.vision_language.datamodule import Sample, to_batch
from tests.trainers import WAIT_S, run_threads

pytestmark = pytest.mark.unit

PAIRS, WIDTH = 8, 5


@pytest.fixture
def pairs():
    draw = torch.Generator().manual_seed(3)
    features = [
        F.normalize(torch.randn(PAIRS, WIDTH, generator=draw, dtype=torch.float64), dim=1)
        for _ in range(2)
    ]
    return *features, torch.tensor([7.0], dtype=torch.float64), torch.arange(PAIRS)


def reference(pictures, texts, scale, names):
    """One pair after the other; pairs of the same name are left out of a softmax."""
    total = 0.0
    for ours, theirs in ((pictures, texts), (texts, pictures)):
        for i in range(len(ours)):
            scores = [scale * float(np.dot(ours[i], other)) for other in theirs]
            wrong = [s for j, s in enumerate(scores) if names[j] != names[i]]
            total += math.log(math.exp(scores[i]) + sum(map(math.exp, wrong))) - scores[i]
    return total / (2 * len(pictures))


@pytest.mark.parametrize("repeated", [False, True])
def test_the_loss_equals_the_reference(pairs, repeated):
    pictures, texts, scale, names = pairs
    names = names // 2 if repeated else names
    found = info_nce(pictures, texts, scale, names)
    arrays = pictures.numpy(), texts.numpy(), scale.item(), names.tolist()
    assert found.item() == pytest.approx(reference(*arrays), rel=1e-12)


def test_perfect_features_have_no_loss_and_equal_ones_that_of_chance(pairs):
    *_, names = pairs
    assert info_nce(torch.eye(PAIRS), torch.eye(PAIRS), torch.tensor([99.0]), names) < 1e-6
    same = torch.eye(PAIRS)[:1].expand(PAIRS, -1)
    assert info_nce(same, same, torch.tensor([9.0]), names).item() == pytest.approx(math.log(PAIRS))


@pytest.fixture
def ranks():
    """Runs a function on each of so many ranks, threads of this process with collectives."""
    torch._C._distributed_c10d._set_thread_isolation_mode(True)  # as torch's own tests do
    threaded._install_threaded_pg()

    def run(num_ranks, function):
        store, results = dist.HashStore(), [None] * num_ranks
        done = threading.Barrier(num_ranks, timeout=WAIT_S)

        def one(rank):
            dist.init_process_group("threaded", rank=rank, world_size=num_ranks, store=store)
            try:
                results[rank] = function(rank)
                done.wait()
            finally:
                dist.destroy_process_group()

        run_threads(*(lambda rank=rank: one(rank) for rank in range(num_ranks)))
        return results

    yield run
    threaded._uninstall_threaded_pg()
    torch._C._distributed_c10d._set_thread_isolation_mode(False)


def gradients(pairs, rows):
    """Loss and gradients by a weight and by the scale, of the pairs in `rows`."""
    pictures, texts, scale, names = pairs
    weight = torch.eye(WIDTH, dtype=torch.float64, requires_grad=True)
    scale = scale.clone().requires_grad_()
    projected = F.normalize(pictures[rows] @ weight, dim=1)
    loss = info_nce(projected, texts[rows] @ weight, scale, names[rows])
    loss.backward()
    return loss.detach(), weight.grad, scale.grad


@pytest.mark.parametrize("num_ranks", [2, 4])
@pytest.mark.parametrize("repeated", [False, True])
def test_the_mean_over_ranks_is_one_process_with_all_pairs(pairs, ranks, num_ranks, repeated):
    if repeated:
        pairs = (*pairs[:3], pairs[3] % 3)
    alone = gradients(pairs, slice(None))
    each = PAIRS // num_ranks
    found = ranks(num_ranks, lambda r: gradients(pairs, slice(r * each, (r + 1) * each)))
    for whole, *parts in zip(alone, *found, strict=True):
        # as data parallelism averages
        torch.testing.assert_close(sum(parts) / num_ranks, whole, rtol=1e-10, atol=1e-12)
    assert not torch.allclose(found[0][1], alone[1])  # no rank has it by itself


def test_every_parameter_gets_the_gradient_of_one_process_with_all_pairs(ranks):
    """Captions too, though the names of one rank are longer than those of the other."""
    sizes = {"vit": {"patch": 4, "width": 8, "depth": 1, "heads": 2}, "contrast": {"width": 8}}
    sizes["gpt"] = {"width": 8, "depth": 1, "heads": 2}
    torch.manual_seed(0)
    pixels = torch.randint(0, 256, (PAIRS, 3, 8, 8), dtype=torch.uint8)
    pairs = [Sample(pixels[i], (*[65 + i] * (i + 1), 0), i + 1, i % 6) for i in range(PAIRS)]
    modules = [VisionLanguageModule("both", size=8, **sizes).double() for _ in range(3)]

    def gradient(module, own):
        module.load_state_dict(modules[-1].state_dict())
        batch = to_batch(own)
        module.loss({**batch, "pixels": batch["pixels"].double()}).backward()
        return {name: parameter.grad for name, parameter in module.named_parameters()}

    whole = gradient(modules[-1], pairs)
    found = ranks(2, lambda rank: gradient(modules[rank], pairs[rank::2]))
    for name, wanted in whole.items():
        mean = (found[0][name] + found[1][name]) / 2
        torch.testing.assert_close(mean, wanted, rtol=1e-9, atol=1e-12)


def test_recall_counts_both_directions_and_ties_as_misses():
    scores = torch.tensor([[9.0, 1.0, 0.0], [2.0, 5.0, 0.0], [8.0, 7.0, 6.0]])
    # rows: hit, hit, third; columns: hit, second, hit
    assert recalls(scores, (1, 2, 3)) == {
        1: pytest.approx(4 / 6),
        2: pytest.approx(5 / 6),
        3: 1.0,
    }
    assert recalls(torch.ones(6, 6), (1, 5, 6)) == {1: 0.0, 5: 0.0, 6: 1.0}
    assert recalls(torch.full((3, 3), math.nan), (1, 2)) == {1: 0.0, 2: 0.0}
