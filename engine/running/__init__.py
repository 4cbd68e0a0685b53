"""Computes what the scheduler decided: executor, worker (model and KV pool), and launches on the device.

executor.py               runs steps, here or (tensor_parallel/) also in other processes; host_copies.py: blocks to
                          host memory and back
worker.py                 one device's model, pool and runner; pool_size.py: how large the pool may be, measured
model_runner.py           one step: input_batch.py, the model, the sampler
decode_graphs.py          decoding steps as CUDA graphs; warm_up.py: what the first requests must not wait for
draft_model.py            a smaller model that guesses; draft_rounds.py: token after token
head_drafter.py          a head that guesses; feature_rows.py: where the last step left what it reads
"""
