"""The parts of `gpu.py`: what is trained, the trainers, their process, the report."""
