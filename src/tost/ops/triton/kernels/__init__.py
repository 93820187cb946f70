"""The kernels. Importing one of these modules imports triton; `tost.ops.triton.launch` does, when a call comes."""
