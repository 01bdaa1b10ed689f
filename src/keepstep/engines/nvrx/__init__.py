"""NVIDIA's ``nvidia-resiliency-ext`` (NVRx) behind keepstep's seams. Runs in the rank.

Only ``library`` imports NVRx; everything else gets its names from there.
"""
