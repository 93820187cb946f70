# %% [markdown]
# # White box in ten equations
#
# From "code tokens with few bits" to the operator, each step checked by a line of code. Tokens are the rows of $Z \in
# \mathbb{R}^{n \times d}$; numbers in brackets are the paper's equations.

# %%
import matplotlib.pyplot as plt
import torch

import tost
from tost import objective

torch.manual_seed(0)
n, d, K, p = 240, 12, 3, 4  # tokens, width, groups, directions of a group

# Tokens near three subspaces of four directions each, and a little noise.
basis = torch.linalg.qr(torch.randn(d, d)).Q
U = basis.view(d, K, p).permute(1, 0, 2)  # [K, d, p]
group = torch.arange(n) % K
strength = torch.tensor([2.0, 1.0, 0.5, 0.2])  # of the directions of a subspace
Z = torch.einsum("ndp,np->nd", U[group], strength * torch.randn(n, p)) + 0.05 * torch.randn(n, d)
eps = d**0.5

# %% [markdown]
# **1. How many bits do the tokens need?** The coding rate is the volume of the tokens, up to a precision $\epsilon$
# [1]:
#
# $$R(Z) = \frac{1}{2} \log\det\left(I + \frac{d}{n \epsilon^2} Z^\top Z\right)$$

# %%
R = objective.coding_rate(Z, eps)
by_hand = 0.5 * torch.logdet(torch.eye(d) + d / (n * eps**2) * Z.T @ Z)
print(f"R = {R:.4f}, by hand {by_hand:.4f}")

# %% [markdown]
# **2. And if they are coded group by group?** With memberships $\pi_k$ (here: who was made from which subspace) [1]:
#
# $$R_c(Z, \Pi) = \sum_{k=1}^{K} \frac{n_k}{n} R(Z_k), \qquad n_k = \sum_{i=1}^{n} \pi_{ik}$$

# %%
pi = torch.nn.functional.one_hot(group, K).float()
Rc = objective.compression_rate(Z, pi, eps)
print(f"R = {R:.3f} for all together, R_c = {Rc:.3f} group by group; saved: {R - Rc:.3f}")

# %% [markdown]
# **3. What should a representation maximize?** The bits saved by knowing the groups [1]:
#
# $$\Delta R = R(Z) - R_c(Z, \Pi)$$

# %%
random_groups = pi[torch.randperm(n)]
true, random = (objective.rate_reduction(Z, groups, eps) for groups in (pi, random_groups))
print(f"Delta R: {true:.3f} for the true groups, {random:.3f} for random ones")

# %% [markdown]
# **4. A bound without determinants.** For a concave $f$ and any orthonormal basis $Q$, the diagonal is enough [3]:
#
# $$\sum_i f(\lambda_i(M)) \le \sum_i f\left((Q^\top M Q)_{ii}\right)$$
#
# with equality in the basis of the eigenvectors. A determinant couples all directions, the right-hand side does not.

# %%
M = Z.T @ Z / n
eigenvectors = torch.linalg.eigh(M).eigenvectors
tilts = torch.linspace(0, 1, 41)
skew = torch.randn(d, d)
skew = skew - skew.T
bounds = [objective.diagonal_bound(M, eigenvectors @ torch.matrix_exp(t * skew)) for t in tilts]
figure, ax = plt.subplots(figsize=(6, 2.8), layout="constrained")
ax.plot(tilts, bounds, label="diagonal in a turned basis")
ax.axhline(objective.spectral_sum(M), color="black", linestyle="--", label="spectrum")
ax.set(xlabel="turned away from the eigenvectors", ylabel="nats", title="Theorem 1: tight in the right basis")
ax.legend()
plt.show()
# %% [markdown]
# **5. The variational objective.** Put a learned basis $U_k$ of $p$ directions for every group in place of $Q$ [4]:
#
# $$R_c^{var}(Z, \Pi \mid U) = \frac{1}{2}
# \sum_{k=1}^{K} \frac{n_k}{n} \sum_{i=1}^{p} \log\left(1 + \frac{d}{\epsilon^2} s_{ki}\right),
# \qquad s_{ki} = \frac{1}{n_k} \sum_{j} \pi_{jk} (U_k^\top z_j)_i^2$$
#
# Only second moments $s$ along single directions are left: token statistics.

# %%
variational = objective.variational_compression(Z, pi, U, eps)
s = torch.einsum("nk,nkp->kp", pi, torch.einsum("nd,kdp->nkp", Z, U) ** 2) / pi.sum(0)[:, None]
by_hand = 0.5 * (pi.sum(0) / n * torch.log1p(d / eps**2 * s).sum(-1)).sum()
print(f"R_c^var = {variational:.4f}, by hand {by_hand:.4f}; the exact rate within the subspaces is no larger")

# %% [markdown]
# **6. Its gradient** has no pair of tokens in it: shrink each token along each direction, by a factor that depends on
# the second moment of its group alone [5, 6]:
#
# $$\frac{\partial R_c^{var}}{\partial z_j} = \frac{1}{n} \sum_k \pi_{jk} U_k D_k U_k^\top z_j,
# \qquad D_k = \operatorname{diag}\left(\frac{d / \epsilon^2}{1 + s_{ki} d / \epsilon^2}\right)$$

# %%
z = Z.clone().requires_grad_()
(automatic,) = torch.autograd.grad(objective.variational_compression(z, pi, U, eps), z)
closed = objective.variational_gradient(Z, pi, U, eps)
print(f"largest difference from automatic differentiation: {(automatic - closed).abs().max():.1e}")

# %% [markdown]
# **7. A layer is a gradient step** [7, 8]:
#
# $$z_j \leftarrow z_j - \tau \sum_k \pi_{jk} U_k D_k U_k^\top z_j$$
#
# Taken again and again it lowers the objective. Directions with a small second moment are shrunk most: noise goes
# first.

# %%
z, path = Z.clone(), []
for _ in range(30):
    path.append(objective.variational_compression(z, pi, U, eps).item())
    z = z + objective.tssa_step(z, pi, U, eps, tau=n / 20)
figure, axes = plt.subplots(1, 2, figsize=(9, 2.8), layout="constrained")
axes[0].plot(path)
axes[0].set(xlabel="step", ylabel="nats", title="$R_c^{var}$")
before, after = ((torch.einsum("nd,ndp->np", tokens, U[group]) ** 2).mean(0).sqrt() for tokens in (Z, z))
axes[1].bar(range(p), after / before)
axes[1].set(xlabel="direction, strong to weak", ylabel="share left", title="30 steps", xticks=range(p), ylim=(0, 1))
plt.show()
# %% [markdown]
# **8. The groups are not given.** They are estimated from the energy of each token in each subspace [10]:
#
# $$\pi_{jk} = \operatorname{softmax}_k\left(\frac{1}{2\eta} \lVert U_k^\top z_j \rVert^2\right)$$

# %%
w = torch.einsum("nd,kdp->nkp", Z, U)[None]  # [1, n, K, p]: batch, tokens, heads, directions
guess = tost.membership(w, torch.full((K,), 2.0), normalize=False)
print(f"largest membership is the true group for {(guess[0].argmax(-1) == group).float().mean():.1%} of the tokens")

# %% [markdown]
# **9. Token statistics self-attention**: the step with estimated groups, a free output matrix and learned
# temperatures. With constants absorbed into the projection, the operator is [11]
#
# $$y_{jk} = -\pi_{jk} \, \frac{w_{jk}}{1 + s_k}, \qquad s_k = \frac{\sum_m \pi_{mk} w_{mk}^2}{\sum_m \pi_{mk}}$$
#
# and it is $-n$ times the gradient of (6), exactly, if the projections are tied:

# %%
temperature = torch.full((K,), 2.0)
y = tost.tssa(w, temperature, normalize=False)
step = torch.einsum("nkp,kdp->nd", y[0], U)
gradient = objective.variational_gradient(Z, guess[0], U, eps)
print(f"largest difference from -n times the gradient: {(step + n * gradient).abs().max():.1e}")

# %% [markdown]
# **10. Sums can be continued.** In the causal form every sum runs over the tokens so far. The three sums of a head
# are its whole state, $K (2p + 1)$ numbers for a layer, after ten tokens and after ten million:
#
# $$a_t = a_{t-1} + w_t^2, \quad b_t = b_{t-1} + \pi_t w_t^2,
# \quad c_t = c_{t-1} + \pi_t, \quad y_t = -\pi_t \frac{w_t}{1 + b_t / c_t}$$

# %%
whole = tost.causal_tssa(w, temperature)
parts, state = [], None
for piece in w.split(50, dim=1):
    part, state = tost.causal_tssa_with_state(piece, temperature, state=state)
    parts.append(part)
print(f"pieces against the whole: {(torch.cat(parts, dim=1) - whole).abs().max():.1e}")
kept = sum(part.numel() for part in (state.squares, state.weighted_squares, state.mass))
print(f"numbers in the state after {n} tokens: {kept}")

# %% [markdown]
# Whether trained networks follow the theory is a question to measure: their output matrix is free, normalized
# energies break the posterior, and the MLP is free too. See [Look inside](../look-inside.md). Where the paper's text,
# listings and code differ: [Which TSSA is right](../which-tssa.md); all equations with their functions and tests:
# [From equations to code](../equations.md).
