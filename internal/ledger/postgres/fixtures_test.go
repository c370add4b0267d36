package postgres

import (
	"time"

	"github.com/token-lease/operator/internal/ledger"
)

const (
	bucketKey = "tenants/pm-4821"
	hour      = time.Hour
)

func testOwner() ledger.Owner {
	return ledger.Owner{
		Cluster: "cluster-1", Namespace: "tenants", Name: "pm-4821", UID: "bucket-uid-1",
		CreatedAt: time.Date(2026, 11, 1, 0, 0, 0, 0, time.UTC),
	}
}

func declared(owner ledger.Owner, generation, limit int64) ledger.ApplyDeclared {
	return ledger.ApplyDeclared{
		Key: bucketKey, Owner: owner, Generation: generation,
		Declaration: ledger.Declaration{
			Limit: limit, TenantID: "pm_4821", ScopedKeyID: "key_pm_4821",
			Settings:       ledger.DefaultSettings(),
			ConflictPolicy: ledger.ConflictReview,
			Raises:         ledger.RaisePolicy{Mode: ledger.ModeEnforce, MaxLimit: 1_000_000, MaxDuration: 24 * hour},
		},
	}
}

// raised asks for a raise from now, or from startsAt, for a while.
func raised(uid string, owner ledger.Owner, normal, temporary int64, length time.Duration, startsAt *time.Time) ledger.StoreRaise {
	from := time.Now()
	if startsAt != nil {
		from = *startsAt
	}
	return ledger.StoreRaise{
		Key: bucketKey, BucketUID: owner.UID, BucketGeneration: 1,
		Grant: ledger.Grant{
			UID: uid, CreatedAt: owner.CreatedAt, Cluster: owner.Cluster, Namespace: owner.Namespace, Name: uid,
			TenantID: "pm_4821", ScopedKeyID: "key_pm_4821",
			NormalLimit: normal, TemporaryLimit: temporary, StartsAt: startsAt, ExpiresAt: from.Add(length),
			ApprovalID: "CHG-" + uid, Actor: "ops@example.com", OnBaseChange: ledger.BaseChangeReview,
		},
	}
}

// start is where a held clock begins.
var start = time.Date(2026, time.November, 30, 18, 0, 0, 0, time.UTC)
