"""`polyrhythm train` from Python, with processes started as by the command; the diary has forward passes only."""

import sys

import job
import torch

import polyrhythm

if __name__ == "__main__":
    torch.manual_seed(0)
    data = job.dataset()
    polyrhythm.train(
        data=(data, tuple(part[:16] for part in data)),
        model=job.Paced(sys.argv[1]),
        strategy="synchronous",
        workers=job.WORKERS,
        batch_size=job.BATCH,
        epochs=job.EPOCHS,
        optimizer=f"sgd(lr={job.RATE})",
        restarts=10,
        start_method="fork",
        threads=1,
        out=f"{sys.argv[1]}-run",
    )
