#!/usr/bin/env python3
"""Measures how well one can predict which blocks of a trace are used again.

A classifier learns from the first half of a trace (Mooncake's format) which blocks are asked for again. It knows all that a
cache could know of a block when it is published: its place in its prompt, the prompt's length, how much of the prompt was
cached, how often the block before was used, the length of the output, and the time since the request before. The script
prints how good its predictions are for the second half, separately for blocks that are new and for others.

    pip install numpy scikit-learn
    scripts/predict_reuse.py mooncake_conversation.jsonl
"""

import json
import sys

import numpy as np
from sklearn.ensemble import HistGradientBoostingClassifier
from sklearn.metrics import roc_auc_score


def blocks_of(path):
    """For each block that a request asks for: its features, whether it is new, and whether it is asked for again."""
    numbers, uses, last_place = {}, {}, {}
    features, is_new, comes_again = [], [], []
    last_timestamp = 0
    for line in open(path):
        request = json.loads(line)
        prefix, blocks = None, []
        for hash_id in request["hash_ids"]:
            prefix = numbers.setdefault((prefix, hash_id), len(numbers))
            blocks.append(prefix)
        known = next((place for place, block in enumerate(blocks) if block not in uses), len(blocks))
        of_request = [
            len(blocks),
            known,
            uses[blocks[known - 1]] if known else 0,
            request["output_length"],
            request["input_length"] % 512,
            request["timestamp"] - last_timestamp,
        ]
        last_timestamp = request["timestamp"]
        for place, block in enumerate(blocks):
            if block in last_place:
                comes_again[last_place[block]] = True
            last_place[block] = len(features)
            features.append([place, place - known, len(blocks) - place, uses.get(block, 0), *of_request])
            is_new.append(block not in uses)
            comes_again.append(False)
        for block in blocks:
            uses[block] = uses.get(block, 0) + 1
    return np.array(features, float), np.array(is_new), np.array(comes_again)


def main():
    features, is_new, comes_again = blocks_of(sys.argv[1])
    is_first_half = np.arange(len(features)) < len(features) // 2
    for name, kind in [("new blocks", is_new), ("others", ~is_new)]:
        train, test = kind & is_first_half, kind & ~is_first_half
        model = HistGradientBoostingClassifier(max_iter=150, learning_rate=0.08, random_state=0)
        model.fit(features[train], comes_again[train])
        chance, truth = model.predict_proba(features[test])[:, 1], comes_again[test]
        surest = np.argsort(-chance)[: len(chance) // 5]
        print(
            f"{name}: {truth.mean():.1%} of {len(truth)} come again; of the fifth most likely to, {truth[surest].mean():.1%};"
            f" area under the curve {roc_auc_score(truth, chance):.2f} (0.5 is chance)"
        )


if __name__ == "__main__":
    main()
