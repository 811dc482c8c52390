"""Open checkpoints from headers, load them into a model, write them in the released layout, inspect them.

open_checkpoint(path)                   -> Checkpoint, a lazy mapping from released names to TensorRef
load_into(destinations, checkpoint)     -> LoadReport
write_released(path, config, tensors)   -> the files written
expected_tensors(config)                -> every stored tensor of a checkpoint, by name
inspect_checkpoint(path)                -> Inspection, from headers alone
"""

from birkhoff.weights.checkpoint import Checkpoint, open_checkpoint
from birkhoff.weights.inspect import Inspection, inspect_checkpoint
from birkhoff.weights.layout import expected_tensors
from birkhoff.weights.released import Packed, write_released
from birkhoff.weights.tensor_ref import TensorRef
from birkhoff.weights.weight_loader import LoadReport, load_into

__all__ = [
    "Checkpoint",
    "Inspection",
    "LoadReport",
    "Packed",
    "TensorRef",
    "expected_tensors",
    "inspect_checkpoint",
    "load_into",
    "open_checkpoint",
    "write_released",
]
