"""The perplexity curve of a healing run as one page that works offline."""

from __future__ import annotations

from pathlib import Path

from ...train.history import read_history


def write_curve(history: Path, path: Path, *, title: str) -> None:
    """Held-out perplexity and KL to the teacher over tokens, from history.csv."""
    from plotly.graph_objects import Figure, Scatter
    from plotly.subplots import make_subplots

    rows = [row for row in read_history(history) if row.get("valid_perplexity")]
    tokens = [int(row["tokens"]) for row in rows]
    figure: Figure = make_subplots(
        rows=1, cols=2, subplot_titles=("perplexity, held-out text", "KL to the original, nats a token")
    )
    perplexity = [float(row["valid_perplexity"]) for row in rows]
    figure.add_trace(Scatter(x=tokens, y=perplexity, mode="lines+markers", name="held-out"), row=1, col=1)
    for name, key in (("held-out", "valid_kl"), ("training", "train_kl")):
        points = [(int(row["tokens"]), float(row[key])) for row in rows if row.get(key)]
        if points:
            x, y = zip(*points, strict=True)
            figure.add_trace(Scatter(x=x, y=y, mode="lines+markers", name=f"KL, {name}"), row=1, col=2)
    figure.update_xaxes(title_text="tokens seen")
    figure.update_layout(
        title=title, template="plotly_white", width=1000, height=420, legend={"orientation": "h", "y": -0.25}
    )
    figure.write_html(path, include_plotlyjs=True, full_html=True)
