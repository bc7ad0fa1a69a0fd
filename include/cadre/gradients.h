// Clips, scales, weighs and checks the gradients of a wrapped model, on all ranks alike.
//
//   cadre::GradScaler scaler;
//   scaler.scale(loss_of(model(x))).backward();  // float16: small gradients stay above zero
//   if (scaler.unscale_(model)) cadre::clip_grad_norm_(model, 1.0);
//   scaler.step(optimizer);  // skipped on all ranks if a gradient is not finite
//   scaler.update();
//   const bool is_finite = cadre::check_gradients_finite(model);
//
// Declares:
// - `clip_grad_norm_()`, `ClipGradNormOptions`: limits the joint norm of all gradients, over all
//   ranks.
// - `gradient_norm()`: returns the joint norm and does not clip.
// - `check_clip_options()`, `limit_gradients()`: the two steps of clip_grad_norm_().
// - `GradScaler`, `GradScalerOptions`: scales the loss and gradients of float16.
// - `check_gradients_finite()`, `NonFiniteOptions`, `NonFinitePolicy`: whether the optimizer should
//   step.
// - `find_nonfinite_gradient()`, `NonFiniteGradient`: the first gradient that is NaN or infinite.
// - `GradientWeighting`, `to_string()`: an option of the wrappers: whether gradients are averaged
//   over ranks, weighted by the ranks' numbers of samples, or summed.
//
// Guide: docs/guide/training/gradients.md. PyTorch: torch.nn.utils.clip_grad_norm_,
// torch.amp.GradScaler.
#pragma once

#include "cadre/parallel/reduction/agreement/gradient_weighting.h"
#include "cadre/parallel/shard/grad_scaler.h"
#include "cadre/parallel/shard/nonfinite_gradients.h"
#include "cadre/parallel/shard/sharded_norm.h"
#include "cadre/tensor/hooks/gradient_norm.h"
