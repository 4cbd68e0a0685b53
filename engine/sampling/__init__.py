"""From a step's logits to token ids, and what is told of them."""
