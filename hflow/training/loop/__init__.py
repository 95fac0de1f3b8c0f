"""The parts of a training backend that do not depend on how the model is sharded.

`microbatches` splits samples, `inputs` packs them, `output` and `loss` run the body, `metrics` averages, and
`infer` and `train` run the steps in order. Denominators, micro-batches and metrics are therefore the same for
every backend.
"""
