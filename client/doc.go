// Package client draws tokens from budgets of the token-lease operator.
//
// Do is what most programs need: it reserves an estimate, runs the work, keeps the
// reservation alive meanwhile, and books what was really spent.
//
//	err := c.Do(ctx, client.Request{Bucket: bucket, Tokens: 4000}, func(ctx context.Context) (int64, error) {
//		answer, err := model.Ask(ctx, prompt)
//		return answer.TokensUsed, err
//	})
//
// Every call is repeated, with growing pauses, while the server says that it may succeed
// later, or cannot be reached: all of them are safe to repeat, since a reservation has a
// request key, which is made once and kept across repetitions, and settling twice with the
// same figure is settling once. A refusal is an *Error; one for lack of tokens is a
// *BudgetExceededError, too, and is not repeated: only the caller knows whether to wait.
//
// The caller is known by a Kubernetes ServiceAccount token with the audience that the
// operator expects, "tokenlease" unless it was told otherwise. A pod gets one from a
// projected volume:
//
//	volumes:
//	  - name: tokenlease
//	    projected:
//	      sources:
//	        - serviceAccountToken: {path: token, audience: tokenlease, expirationSeconds: 3600}
//
// The kubelet renews the file, and the client reads it again.
package client
