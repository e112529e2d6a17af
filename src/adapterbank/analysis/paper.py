"""The paper's own numbers (Houlsby et al. 2019, tables 1 and 2), for comparison. Computes nothing."""

from __future__ import annotations

from collections.abc import Mapping

GLUE_COLUMNS: Mapping[str, tuple[str, str, str]] = {
    "CoLA": ("glue/cola", "dev", "matthews"),
    "SST-2": ("glue/sst2", "dev", "accuracy"),
    "MRPC": ("glue/mrpc", "dev", "f1"),
    "STS-B": ("glue/stsb", "dev", "spearman"),
    "QQP": ("glue/qqp", "dev", "f1"),
    "MNLI-m": ("glue/mnli", "dev", "accuracy"),
    "MNLI-mm": ("glue/mnli", "dev_mismatched", "accuracy"),
    "QNLI": ("glue/qnli", "dev", "accuracy"),
    "RTE": ("glue/rte", "dev", "accuracy"),
}
"""Column of table 1 -> task of the catalog, our split, and the paper's metric."""

GLUE: Mapping[str, tuple[str, tuple[float, ...], float]] = {
    "full": ("100 %", (60.5, 94.9, 89.3, 87.6, 72.1, 86.7, 85.9, 91.1, 70.1), 80.4),
    "adapters 8–256": ("3.6 %", (59.5, 94.0, 89.5, 86.9, 71.8, 84.9, 85.1, 90.7, 71.5), 80.0),
    "adapters 64": ("2.1 %", (56.9, 94.2, 89.6, 87.3, 71.8, 85.3, 84.6, 91.4, 68.8), 79.6),
}
"""Table 1, BERT-large on GLUE's test server: trained per task, the scores in the order of `GLUE_COLUMNS`, the total."""

FURTHER_METHODS = ("automl", "full", "top", "adapter")
"""Columns of table 2, by our names; `top` is variable fine-tuning."""

Scores = tuple[float, tuple[float, float], tuple[float, float], tuple[float, float]]

FURTHER: Mapping[str, Scores] = {
    "paper/20newsgroups": (91.1, (92.8, 0.1), (92.8, 0.1), (91.7, 0.2)),
    "paper/airline": (84.5, (83.6, 0.3), (84.0, 0.1), (84.5, 0.2)),
    "paper/corporate_messaging": (91.9, (92.5, 0.5), (92.4, 0.6), (92.9, 0.3)),
    "paper/disasters": (84.9, (85.3, 0.4), (85.3, 0.4), (84.1, 0.2)),
    "paper/economic_news": (81.1, (82.1, 0.0), (78.9, 2.8), (82.5, 0.3)),
    "paper/emotion": (36.3, (38.4, 0.1), (37.6, 0.2), (38.7, 0.1)),
    "paper/global_warming": (82.7, (84.2, 0.4), (81.9, 0.2), (82.7, 0.3)),
    "paper/political_audience": (81.0, (80.9, 0.3), (80.7, 0.8), (79.0, 0.5)),
    "paper/political_bias": (76.8, (75.2, 0.9), (76.5, 0.4), (75.9, 0.3)),
    "paper/political_message": (43.8, (38.9, 0.6), (44.9, 0.6), (44.1, 0.2)),
    "paper/primary_emotions": (33.5, (36.9, 1.6), (38.2, 1.0), (33.9, 1.4)),
    "paper/progressive_opinion": (70.6, (71.6, 0.5), (75.9, 1.3), (71.7, 1.1)),
    "paper/progressive_stance": (54.3, (63.8, 1.0), (61.5, 1.3), (60.6, 1.4)),
    "paper/us_economy": (75.6, (75.3, 0.1), (76.5, 0.4), (77.3, 0.1)),
    "paper/customer_complaints": (54.5, (55.9, 0.1), (56.4, 0.1), (55.4, 0.1)),
    "paper/news_aggregator": (95.2, (96.3, 0.0), (96.5, 0.0), (96.2, 0.0)),
    "paper/sms_spam": (98.5, (99.3, 0.2), (99.3, 0.2), (95.1, 2.2)),
}
"""Table 2, BERT-base: test accuracy of AutoML without BERT, and with its standard error that of the three others."""
