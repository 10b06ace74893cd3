import torch, vitrify
x = torch.ones(2, 2, requires_grad=True)
y = vitrify.compile(lambda x: x.to(torch.complex64).conj())(x)
t = torch.ones(4, 2, dtype=torch.complex64)[::2]
print(torch.autograd.grad(y, x, t, create_graph=True))
