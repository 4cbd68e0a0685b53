"""From a step's logits to token ids and their logprobs."""
