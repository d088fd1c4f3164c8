"""`python -m slurmllm`: what the job scripts call, so that they need no PATH."""

from slurmllm.cli.main import main

if __name__ == "__main__":
    main()
