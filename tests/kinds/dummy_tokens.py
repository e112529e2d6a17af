"""A second kind that the library does not have: one output for each token, which marks words of the text."""

from __future__ import annotations

from adapterbank.kinds.kind import Kind


def _read_targets(table, task, rows):
    """A target is the tuple of (start, end) of the words that the cell lists."""
    found = []
    for row in rows:
        text, words = table.columns[task.text[0]][row], table.columns[task.label][row]
        found.append(tuple((text.index(word), text.index(word) + len(word)) for word in words))
    return found, []


def _window_targets(windows, target):
    return [[float(any(a < end and b > start for start, end in target)) for a, b in row.offsets] for row in windows]


def _targets(targets, head):
    import torch
    from torch.nn.utils.rnn import pad_sequence

    return pad_sequence([torch.tensor(row) for row in targets], batch_first=True)


def _loss(x, targets, head, counts):
    """Mean over the tokens of the row; a batch may be wider or narrower than all targets together."""
    import torch
    import torch.nn.functional as F

    wanted = F.pad(targets, (0, max(0, x.shape[1] - targets.shape[1])))[:, : x.shape[1]]
    real = torch.arange(x.shape[1], device=x.device) < counts[:, None]
    each = F.binary_cross_entropy_with_logits(x[:, :, 0], wanted, reduction="none")
    return (each * real).sum(1) / counts


def _decide(given):
    found = []
    for mine in given.rows.by_example(len(given.examples)):
        marked = set()
        for row in mine:
            offsets = given.rows.tokens[row].offsets
            marked |= {tuple(place) for place in offsets[given.outputs[row][:, 0] > 0].tolist() if place[0] >= 0}
        found.append(tuple(sorted(marked)))
    return found


def _predict(given, best):
    return [
        {"labels": tuple(text[start:end] for start, end in marked)}
        for text, marked in zip(given.examples.texts, _decide(given), strict=True)
    ]


MARKS = Kind(
    name="marks",
    metrics=("subset_accuracy",),
    reported=("subset_accuracy",),
    check_prediction=lambda value, labels, what: value,
    check_target=lambda value, labels, what: value,
    text_counts=(1,),
    read_targets=_read_targets,
    outputs=lambda labels: 1,
    per_token=True,
    window_targets=_window_targets,
    targets=_targets,
    loss=_loss,
    consistency=lambda x, y, targets, head, counts: ((x - y) ** 2).mean((1, 2)),
    decide=_decide,
    predict=_predict,
)
