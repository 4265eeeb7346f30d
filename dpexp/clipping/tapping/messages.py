"""What a back-propagation through taps refuses, in words."""

REENTRANT = (
    "reentrant activation checkpointing cannot be clipped: pass use_reentrant=False "
    "(transformers: gradient_checkpointing_kwargs={'use_reentrant': False})"
)
OUTSIDE = (
    "was computed outside of the model's forward, while gradients were (reversible layers as Reformer's, adjoint "
    "solvers as odeint_adjoint, reentrant checkpointing), and no clipper sees whose gradient that is: let the model keep its "
    "activations (odeint), or checkpoint with use_reentrant=False"
)
SELECTIVE = (
    "selective activation checkpointing keeps what it saved for a single back-propagation, and a clipper needs several to prove "
    "what it does: leave context_fn=create_selective_checkpoint_contexts(…) out, so that checkpoint() computes all of it again"
)
NESTED = (
    "was reached by a back-propagation inside of the one that clips (a hook or a backward of the model's own that asks "
    "autograd for gradients: the solver of a fixed point), and no clipper sees what is made of it: give the inner function "
    "detached parameters (torch.func.functional_call(module, {name: p.detach() for name, p in module.named_parameters()}, z)), "
    "or back-propagate through the last iterations instead"
)
SPENT = (
    "these losses, or others of the same forward, were back-propagated before, and what their graph held is freed: add the "
    "losses of each example, and call backward once for each forward"
)
EARLIER = (
    "these losses come from a forward of an earlier batch (outputs that were kept), whose examples would count twice: compute "
    "the losses of each batch from forwards that begin after it was taken"
)
TORCH_SAYS = {
    "Checkpointing is not compatible": REENTRANT,
    "selective activation checkpoint": SELECTIVE,
    "Trying to backward through the graph a second time": SPENT,
}
OVERWRITTEN = (
    "was given a tensor that the model writes to later on. Ordinary autograd, which may need less of it, carries the gradient "
    "from now on: run this step again"
)
TWICE = (
    "a loss that contains a gradient (create_graph=True: a gradient penalty, forces, an equation's residual) cannot be clipped: "
    "the derivative of a gradient passes no tap. Let the model's forward compute it by torch.func, which is clipped exactly: "
    "torch.func.grad(lambda x: self.net(x).sum())(x). (torch.func in the training loop is clipped too, and not looked at for "
    "examples that meet. A layer of a library that asks for gradients in its forward, as some flows do, has to be replaced)"
)
PLAINLY = (
    "loss.backward() reached a model with a clipper attached: call engine.step(losses) of the PrivacyEngine, or "
    "clipper.backward(losses), with one loss per example; engine.close() or clipper.detach() ends clipping "
    "(a copy that was made before stays clipped: load its state_dict() into a plain model). "
    "Gradients of other tensors are free: torch.autograd.grad(loss, inputs), loss.backward(inputs=[…])"
)
OTHERWISE = (
    "a checkpointed part of the model computed something else when it was computed again (a layer that is used on constants and "
    "on the batch, in the first step): run this step again, or use engine='loop'"
)
