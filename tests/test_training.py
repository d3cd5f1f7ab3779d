"""The loss of a trainable model: its value, its gradient, its routers."""

from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jinfire as jf
from experiments.tiny_models import TINY_MODELS

LLAMA4 = TINY_MODELS["llama4-smoke"]
# A query latent or none, one group or two.
KIMI = TINY_MODELS["kimi-smoke"] | {"q_lora_rank": None, "n_group": 2, "topk_group": 1}
LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 61,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "tie_word_embeddings": True,
}
CONFIGS = {"llama4": LLAMA4, "kimi": KIMI, "llama": LLAMA}


class Case:
    """A model with weights, ids, and its compiled loss and gradient."""

    def __init__(self, config_json) -> None:
        self.model = jf.TrainableModel(config_json)
        params = self.model.init(3)
        rng = np.random.default_rng(0)
        # Norm scales that are not one, and selection biases that are not zero.
        self.params = {
            name: value + rng.normal(size=value.shape).astype(np.float32) * 0.05
            if value.ndim == 1
            else value
            for name, value in params.items()
        }
        self.ids_BT = rng.integers(0, self.model.config.vocab_size, (2, 25)).astype(np.int32)
        self.loss = jax.jit(self.model.loss)
        self.gradient = jax.jit(jax.value_and_grad(self.model.loss, has_aux=True))


@pytest.fixture(scope="module", params=CONFIGS)
def case(request: pytest.FixtureRequest) -> Case:
    return Case(CONFIGS[request.param])


def test_gradient_of_a_dense_model() -> None:
    check_gradient(Case(CONFIGS["llama"]))


# Minutes of compiling; the gradient of experts' products is in test_grouped_matmul_grad.py.
@pytest.mark.long
@pytest.mark.parametrize("name", ["llama4", "kimi"])
def test_gradient_of_experts(name: str) -> None:
    check_gradient(Case(CONFIGS[name]))


def check_gradient(case: Case) -> None:
    """Of every tensor, along its own gradient, where no token changes its experts."""
    (_, routing), gradients = case.gradient(case.params, case.ids_BT)
    assert gradients.keys() == case.params.keys()
    step = 2e-3
    for name, gradient in gradients.items():
        gradient = np.asarray(gradient)
        slope = float(np.linalg.norm(gradient))
        if name.endswith("router.bias"):
            assert slope == 0
            continue
        assert slope > 0, name
        direction, value = gradient / slope, np.asarray(case.params[name])
        losses = []
        for sign in (1, -1):
            moved = value + np.float32(sign * step) * direction
            loss, then = case.loss({**case.params, name: moved}, case.ids_BT)
            np.testing.assert_array_equal(then.load, routing.load, err_msg=name)
            losses.append(float(loss))
        difference = (losses[0] - losses[1]) / (2 * step)
        # Float32 losses of about 5 are 5e-7 apart.
        assert difference == pytest.approx(slope, rel=0.01, abs=5e-4), name


def test_loss_is_that_of_the_saved_model(case: Case, tmp_path: Path) -> None:
    case.model.save(tmp_path / "model", case.params, "float32")
    model = jf.Model.from_pretrained(tmp_path / "model")
    assert model.config == case.model.config
    for name, value in model.params().items():
        np.testing.assert_array_equal(value, case.params[name], err_msg=name)
    logits = model.logits(case.ids_BT[:, :-1]).astype(np.float64)
    logits -= np.log(np.exp(logits).sum(axis=-1, keepdims=True))
    chosen = np.take_along_axis(logits, case.ids_BT[:, 1:, None], axis=-1)
    assert float(case.loss(case.params, case.ids_BT)[0]) == pytest.approx(-chosen.mean(), rel=1e-5)


def test_save_keeps_selection_biases_whole(tmp_path: Path) -> None:
    model = jf.TrainableModel(KIMI)
    bias = "layers.1.mlp.router.bias"
    params = model.init(0) | {bias: jnp.asarray([0.1, 1 / 3, -1e-5, 0], jnp.float32)}
    model.save(tmp_path / "model", params)
    source = jf.open_checkpoint(tmp_path / "model")
    np.testing.assert_array_equal(source.read(bias, (slice(None),)), params[bias])
    stored = source.read("head.weight", (slice(None), slice(None)))
    assert stored.dtype == jnp.bfloat16
    np.testing.assert_array_equal(stored, np.asarray(params["head.weight"]).astype(stored.dtype))
    with pytest.raises(ValueError, match="a checkpoint already"):
        model.save(tmp_path / "model", params)


@pytest.mark.parametrize("name", ["llama4", "kimi"])
def test_routing_counts_tokens(name: str) -> None:
    case = Case(CONFIGS[name])
    experts = case.model.config.experts
    assert experts is not None
    _, routing = case.loss(case.params, case.ids_BT)
    layers = sum(layer.mlp == "experts" for layer in case.model.config.layers)
    assert routing.load.shape == (layers, experts.count)
    np.testing.assert_array_equal(routing.load.sum(axis=1), 48 * experts.per_token)
    # Equal logits: the first experts have all tokens, the probabilities are even.
    equal = {
        key: jnp.zeros_like(value) if ".router." in key else value
        for key, value in case.params.items()
    }
    _, routing = case.loss(equal, case.ids_BT)
    assert float(routing.balance_loss) == pytest.approx(1, rel=1e-6)
    assert np.count_nonzero(routing.load) == layers * experts.per_token


def test_balance_loss_evens_the_load() -> None:
    """Descent on it alone; it is largest where the busiest experts are the likeliest too."""
    case = Case(LLAMA4)
    slopes = jax.jit(jax.grad(lambda params, ids: case.model.loss(params, ids)[1].balance_loss))
    params, imbalances = case.params, []
    for _ in range(30):
        load = np.asarray(case.loss(params, case.ids_BT)[1].load)
        imbalances.append(load.max() / load.mean())
        change = slopes(params, case.ids_BT)
        params = jax.tree.map(lambda x, slope: x - 0.3 * slope, params, change)
    assert min(imbalances[-5:]) < 0.75 * imbalances[0]


def test_biases_move_against_the_load() -> None:
    case = Case(KIMI)
    load = jnp.asarray([[30, 6, 12, 0]], jnp.int32)
    bias = "layers.1.mlp.router.bias"
    moved = case.model.balanced(case.params, jf.Routing(load, jnp.float32(0)), 0.25)
    np.testing.assert_allclose(moved[bias] - case.params[bias], [-0.25, 0.25, 0, 0.25], atol=1e-6)
    assert all(moved[name] is case.params[name] for name in moved if name != bias)
    params, worst = case.params, []
    for _ in range(60):
        _, routing = case.loss(params, case.ids_BT)
        load = np.asarray(routing.load)
        worst.append(load.max() / load.mean())
        params = case.model.balanced(params, routing, 0.02)
    assert min(worst[-5:]) < min(worst[0], 1.5)


def test_models_without_biases_stay_as_they_are() -> None:
    case = Case(LLAMA4)
    _, routing = case.loss(case.params, case.ids_BT)
    assert case.model.balanced(case.params, routing, 0.1) == case.params


def test_init_follows_the_seed() -> None:
    model = jf.TrainableModel(KIMI)
    first, again, other = model.init(0), model.init(0), model.init(1)
    for name, value in first.items():
        np.testing.assert_array_equal(value, again[name])
        assert value.dtype == jnp.float32
    assert not np.array_equal(first["head.weight"], other["head.weight"])
    assert not np.asarray(first["layers.1.mlp.router.bias"]).any()
    assert sum(value.size for value in first.values()) == model.num_parameters
    assert model.num_active_parameters < model.num_parameters


def test_four_bit_experts_are_refused() -> None:
    weights = {"num_bits": 4, "group_size": 32, "strategy": "group", "symmetric": True}
    scheme = {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": {"type": "int"} | weights}},
        "ignore": [
            "lm_head",
            "re:.*self_attn.*",
            "re:.*shared_experts.*",
            r"re:.*mlp\.(gate|up|gate_up|down)_proj.*",
        ],
    }
    with pytest.raises(ValueError, match="4-bit"):
        jf.TrainableModel(KIMI | {"quantization_config": scheme})
