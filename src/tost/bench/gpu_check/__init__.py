"""The Triton kernels on this machine's GPU: are they right, and how fast are they?"""
