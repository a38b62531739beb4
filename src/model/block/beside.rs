//! Experts beside a dense MLP in the reference block: the norms that each has of its own, and a router that takes the residual stream.

use super::{BlockScratch, ReferencePass};
use crate::base::Result;
use crate::model::spec::ExpertsSpec;
use crate::model::weights::{DenseAndExperts, Experts};
use crate::ops::{activation, norm};

impl ReferencePass<'_> {
    /// Normalizes the output of the dense MLP, puts it aside, and computes the input of the experts in `normed`.
    pub(super) fn enter_experts(
        &self,
        weights: &DenseAndExperts,
        s: &mut BlockScratch,
    ) -> Result<()> {
        let len = self.rows * self.spec.hidden_size;
        let (dense, eps) = (s.normed.first_mut(len)?, self.spec.norm_eps);
        norm::rms_norm_in_place(self.device, dense, &weights.dense_norm, eps)?;
        std::mem::swap(&mut s.normed, &mut s.experts.beside);
        self.enter(Some(&weights.experts_input_norm), s)
    }

    /// Normalizes the sum of the experts in `normed`, and adds the output of the dense MLP.
    pub(super) fn leave_experts(
        &self,
        weights: &DenseAndExperts,
        s: &mut BlockScratch,
    ) -> Result<()> {
        let len = self.rows * self.spec.hidden_size;
        let (sum, eps) = (s.normed.first_mut(len)?, self.spec.norm_eps);
        norm::rms_norm_in_place(self.device, sum, &weights.experts_norm, eps)?;
        let (sum, beside) = (s.normed.first_mut(len)?, s.experts.beside.first(len)?);
        activation::add(self.device, sum, beside)
    }

    /// The logits of the router: of the half's input, or of the residual stream by a norm of its own.
    pub(super) fn router_logits(
        &self,
        (spec, weights): (&ExpertsSpec, &Experts),
        s: &mut BlockScratch,
    ) -> Result<Vec<f32>> {
        let router = &weights.router.linear;
        let Some([norm, _]) = &weights.router_scales else {
            return self.products(router, spec.count, s);
        };
        std::mem::swap(&mut s.normed, &mut s.experts.beside);
        let logits = self
            .enter(Some(norm), s)
            .and_then(|()| self.products(router, spec.count, s));
        std::mem::swap(&mut s.normed, &mut s.experts.beside);
        logits
    }
}
