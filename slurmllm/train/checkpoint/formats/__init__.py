"""Checkpoint file formats: native (torch.distributed.checkpoint), NxD and Hugging Face."""
