"""The native backend in Triton; import ``backend`` for it, kernels load when it is used."""
