package v1alpha1

// Identifier is a name that somebody else gave to something: a tenant, a key, an
// approval. It is compared byte for byte and stored as written, never a secret.
// The bounds are those of the ledger: at most 128 UTF-16 units, no white space
// at either end, no control character.
//
// +kubebuilder:validation:MinLength=1
// +kubebuilder:validation:MaxLength=128
// +kubebuilder:validation:XValidation:rule="self.size() + self.findAll(r'[\\x{10000}-\\x{10FFFF}]').size() <= 128",message="must be at most 128 UTF-16 units long; a character outside the basic plane (an emoji, for one) counts twice"
// +kubebuilder:validation:XValidation:rule="!self.matches(r'^[\\p{Z}\\x{FEFF}]|[\\p{Z}\\x{FEFF}]$')",message="must not begin or end with white space"
// +kubebuilder:validation:XValidation:rule="!self.matches(r'[\\x00-\\x1F\\x7F]')",message="must not contain control characters (U+0000 to U+001F, U+007F)"
type Identifier string
