"""The paper's Fourier inversion on the finite cyclic group Z_n^d, where it is exact; and its error with M points.

    python bench/studies/theory_plot.py          draws docs/theory.svg

Frequencies are the dual group, θ = 2πκ/n with κ in Z_n^d: N = n^d of them, and the mean over all N takes the place of
the integral over (2π)^-d dθ. The tests in tests/model/layers/mixing/test_theory.py are written with these functions.

Letters: T tokens, D their dimension d, F frequencies.
"""

from pathlib import Path

import numpy as np

FIGURE = Path(__file__).resolve().parents[2] / "docs" / "theory.svg"
SIDE, DIMENSIONS = 32, 2
TOKENS = (4, 16, 64)
TRIALS = 200


def dual_group(side: int, dimensions: int) -> np.ndarray:
    """All N = side^dimensions frequencies [F, D], in [0, 2π)."""
    axes = np.meshgrid(*[np.arange(side)] * dimensions, indexing="ij")
    return 2 * np.pi / side * np.stack([axis.ravel() for axis in axes], axis=1)


def distinct_tokens(rng: np.random.Generator, count: int, side: int, dimensions: int) -> np.ndarray:
    """`count` different elements of the group [T, D], as integers from -side/2 up to side/2."""
    chosen = rng.choice(side**dimensions, size=count, replace=False)
    return np.stack(np.unravel_index(chosen, (side,) * dimensions), axis=1) - side // 2


def characteristic(theta_FD: np.ndarray, tokens_TD: np.ndarray, p_T: np.ndarray) -> np.ndarray:
    """φ(θ) = Σ p_k e^{i⟨θ, h_k⟩} at every frequency [F]."""
    return np.exp(1j * theta_FD @ tokens_TD.T) @ p_T


def gradient(theta_FD: np.ndarray, tokens_TD: np.ndarray, p_T: np.ndarray) -> np.ndarray:
    """S(θ) = ∇φ(θ) = i Σ p_k h_k e^{i⟨θ, h_k⟩} at every frequency [F, D]."""
    return 1j * np.exp(1j * theta_FD @ tokens_TD.T) @ (p_T[:, None] * tokens_TD)


def readout(summary_F: np.ndarray, query_F: np.ndarray) -> np.ndarray:
    """⟨S, w⟩, the mean over the frequencies of S(θ) conj(w(θ)): [F] or [F, D] to a number or [D]."""
    return np.tensordot(query_F.conj(), summary_F, axes=(0, 0)) / len(query_F)


def retrieval_error(rng: np.random.Generator, count: int, points: int) -> float:
    """Root mean square of |retrieved - h_j| / |h|, over trials, when only `points` of the N frequencies are summed.

    |h| is the root mean square length of the other tokens, the unit of their leakage.
    """
    theta_FD = dual_group(SIDE, DIMENSIONS)
    squares = []
    for _ in range(TRIALS):
        tokens_TD = distinct_tokens(rng, count, SIDE, DIMENSIONS)
        sampled_FD = theta_FD[rng.choice(len(theta_FD), size=points, replace=False)]
        # The character of the first token, times i/p: the inversion formula for a token of weight p = 1/count.
        query_F = 1j * count * np.exp(1j * sampled_FD @ tokens_TD[0])
        retrieved_D = readout(gradient(sampled_FD, tokens_TD, np.full(count, 1 / count)), query_F)
        squares.append(np.sum(np.abs(retrieved_D - tokens_TD[0]) ** 2) / np.mean(np.sum(tokens_TD[1:] ** 2, axis=1)))
    return float(np.sqrt(np.mean(squares)))


def expected_error(count: int, points: int) -> float:
    """√((t-1)/M · (N-M)/(N-1)): each other token leaks through a mean of M characters drawn without replacement."""
    frequencies = SIDE**DIMENSIONS
    return float(np.sqrt((count - 1) / points * (frequencies - points) / (frequencies - 1)))


def draw(path: Path = FIGURE) -> None:
    """The figure of docs/theory.md: the same bytes every time."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    # Without a fixed salt and with a date, the file would differ each time it is drawn.
    matplotlib.rcParams.update({"svg.hashsalt": "nautile", "svg.fonttype": "none", "font.size": 9})
    rng = np.random.default_rng(0)
    frequencies = SIDE**DIMENSIONS
    # Powers of two, and some near N, where the error falls to zero within a few points.
    points = [2**power for power in range(10)] + [768, 960, 1008, 1023]
    figure, axes = plt.subplots(figsize=(6.4, 3.8), layout="constrained")
    for count, colour in zip(TOKENS, ("tab:blue", "tab:orange", "tab:green"), strict=True):
        axes.plot(points, [expected_error(count, m) for m in points], color=colour, linewidth=1)
        errors = [retrieval_error(rng, count, m) for m in points]
        axes.plot(points, errors, "o", color=colour, markersize=3.5, label=f"t = {count} tokens")
    axes.axvline(frequencies, color="black", linewidth=0.8)
    axes.text(frequencies * 1.06, 0.0035, "M = N: exact, 1e-15", rotation=90, va="bottom", fontsize=8)
    for m, label in ((2, "M = 2, a head"), (32, "K·M = 32, a layer's heads together")):
        axes.axvline(m, color="grey", linewidth=0.8, linestyle=":")
        axes.text(m * 1.06, 0.0035, label, rotation=90, va="bottom", fontsize=8, color="grey")
    axes.set(
        xscale="log", yscale="log", xlim=(0.8, 2000), ylim=(0.003, 12), xlabel="spectral points M summed, of N = 1024"
    )
    axes.set_ylabel("error of the retrieved token / length of a token")
    axes.legend(frameon=False, loc="lower left", bbox_to_anchor=(0.14, 0.02))
    figure.savefig(path, metadata={"Date": None, "Creator": None})
    plt.close(figure)


if __name__ == "__main__":
    draw()
