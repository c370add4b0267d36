package controlplane

import (
	"fmt"
	"os"

	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/clientcmd"
	"k8s.io/client-go/tools/clientcmd/api"

	"github.com/token-lease/operator/hack/devenv/process"
)

const (
	contextName = "tokenlease-devenv"
	// The defaults of a rest.Config suit one controller, not a test that acts as
	// several clients at once.
	requestsPerSecond = 200
	requestBurst      = 400
)

// RESTConfig is a configuration with all rights.
func (c *ControlPlane) RESTConfig() *rest.Config { return rest.CopyConfig(c.admin) }

// KubeconfigPath is a file with the same rights as RESTConfig.
func (c *ControlPlane) KubeconfigPath() string { return c.file(adminConfig) }

// UserConfig is a configuration to act as a user, who has no rights but those
// that RBAC gives to the user, the groups and system:authenticated.
func (c *ControlPlane) UserConfig(user string, groups ...string) (*rest.Config, error) {
	certificate, key, err := c.authority.client(user, groups)
	if err != nil {
		return nil, err
	}
	return &rest.Config{
		Host: "https://" + process.Address(c.ports.apiServer),
		TLSClientConfig: rest.TLSClientConfig{
			CAData: c.authority.pem(), CertData: certificate, KeyData: key,
		},
		QPS: requestsPerSecond, Burst: requestBurst,
	}, nil
}

// ServiceAccountConfig is a configuration to act as a ServiceAccount, which need
// not exist.
func (c *ControlPlane) ServiceAccountConfig(namespace, name string) (*rest.Config, error) {
	return c.UserConfig("system:serviceaccount:"+namespace+":"+name,
		"system:serviceaccounts", "system:serviceaccounts:"+namespace)
}

// WriteKubeconfig writes a configuration made by UserConfig or
// ServiceAccountConfig, or one with a bearer token instead, to a file, readable by its
// owner only.
func WriteKubeconfig(path string, config *rest.Config) error {
	file := api.NewConfig()
	file.Clusters[contextName] = &api.Cluster{Server: config.Host, CertificateAuthorityData: config.CAData}
	file.AuthInfos[contextName] = &api.AuthInfo{ClientCertificateData: config.CertData, ClientKeyData: config.KeyData, Token: config.BearerToken}
	file.Contexts[contextName] = &api.Context{Cluster: contextName, AuthInfo: contextName}
	file.CurrentContext = contextName
	content, err := clientcmd.Write(*file)
	if err != nil {
		return fmt.Errorf("write a kubeconfig: %w", err)
	}
	return os.WriteFile(path, content, 0o600)
}

// writeKubeconfigs writes those that the control plane itself needs.
func (c *ControlPlane) writeKubeconfigs() error {
	controllerManager, err := c.UserConfig("system:" + controllerMgr)
	if err != nil {
		return err
	}
	if err := WriteKubeconfig(c.file(controllerMgrConfig), controllerManager); err != nil {
		return err
	}
	if c.admin, err = c.UserConfig(adminUser, adminGroup); err != nil {
		return err
	}
	return WriteKubeconfig(c.file(adminConfig), c.admin)
}
